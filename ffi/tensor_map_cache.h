// Tensor maps that a call site has encoded before, by address: XLA hands over the same few addresses nearly always.

#ifndef JAX_QLA_FFI_TENSOR_MAP_CACHE_H_
#define JAX_QLA_FFI_TENSOR_MAP_CACHE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "driver.h"

namespace jax_qla {

// The maps of one plan in one CUDA context. All but the address of a map is static in a plan, and a map says nothing of
// what lies at its address, so it stays right for as long as the context lives. Not thread-safe by itself: see `mutex`.
class TensorMapCache {
 public:
  // `count`: number of tensor maps in the plan.
  explicit TensorMapCache(size_t count) : places_(count) {}

  // Whoever uses the cache, or an address of a map in it, holds this. A launch that would have to wait encodes instead.
  std::mutex mutex;

  // The map of this number in the plan over this address, or null.
  CUtensorMap* Find(size_t number, const void* address) {
    Place& place = places_[number];
    for (size_t i = 0; i < kWays; ++i) {
      if (place.addresses[i] == address) {
        return &place.maps[i];
      }
    }
    return nullptr;
  }

  // Keeps a map, in place of the one that has been kept for longest.
  CUtensorMap* Keep(size_t number, const void* address, const CUtensorMap& map) {
    Place& place = places_[number];
    const size_t i = place.next++ % kWays;
    place.addresses[i] = address;
    place.maps[i] = map;
    return &place.maps[i];
  }

 private:
  // A result has another address than the one before it while that is still held, so that two take turns.
  static constexpr size_t kWays = 4;

  struct Place {
    std::array<CUtensorMap, kWays> maps;
    std::array<const void*, kWays> addresses = {};  // null: none yet. No map is over null, which has no bytes.
    size_t next = 0;
  };

  std::vector<Place> places_;
};

}  // namespace jax_qla

#endif  // JAX_QLA_FFI_TENSOR_MAP_CACHE_H_
