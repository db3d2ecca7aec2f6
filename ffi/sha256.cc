#include "sha256.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace jax_qla {
namespace {

constexpr size_t kBlockBytes = 64;
// The message's length in bits closes the last block.
constexpr size_t kLengthBytes = 8;

// First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

using State = std::array<uint32_t, 8>;

constexpr uint32_t RotateRight(uint32_t word, int count) { return (word >> count) | (word << (32 - count)); }

// Folds one block of 64 bytes into the state (FIPS 180-4, 6.2.2).
void Compress(State& state, const unsigned char* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) {
    w[t] = uint32_t{block[4 * t]} << 24 | uint32_t{block[4 * t + 1]} << 16 | uint32_t{block[4 * t + 2]} << 8 |
           uint32_t{block[4 * t + 3]};
  }
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = RotateRight(w[t - 15], 7) ^ RotateRight(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = RotateRight(w[t - 2], 17) ^ RotateRight(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t s1 = RotateRight(e, 6) ^ RotateRight(e, 11) ^ RotateRight(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t t1 = h + s1 + choice + kRoundConstants[t] + w[t];
    const uint32_t s0 = RotateRight(a, 2) ^ RotateRight(a, 13) ^ RotateRight(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t2 = s0 + majority;
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const State round = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) {
    state[i] += round[i];
  }
}

}  // namespace

std::string Sha256Hex(std::string_view bytes) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  const size_t whole = bytes.size() / kBlockBytes * kBlockBytes;
  for (size_t offset = 0; offset < whole; offset += kBlockBytes) {
    Compress(state, data + offset);
  }

  // What is left, a single 1 bit, zeros, and the length in bits: one block, or two where the length no longer fits.
  std::array<unsigned char, 2 * kBlockBytes> tail = {};
  const size_t rest = bytes.size() - whole;
  for (size_t i = 0; i < rest; ++i) {
    tail[i] = data[whole + i];
  }
  tail[rest] = 0x80;
  const size_t tail_bytes = rest + 1 + kLengthBytes <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    tail[tail_bytes - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
  }
  for (size_t offset = 0; offset < tail_bytes; offset += kBlockBytes) {
    Compress(state, tail.data() + offset);
  }

  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(64);
  for (uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      hex.push_back(kDigits[(word >> shift) & 0xf]);
    }
  }
  return hex;
}

}  // namespace jax_qla
