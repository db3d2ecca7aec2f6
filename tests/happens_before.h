// Whether every two accesses to the shared memory of a cluster's blocks, one of them a write, are ordered, whatever the order in which
// tests/cuda_on_cpu.cc runs the threads: vector clocks, as in FastTrack (Flanagan and Freund, PLDI 2009). Accesses of the kernel's own code are
// reported by what the compiler inserts with -fsanitize=thread; those of instructions by tests/cuda_on_cpu.cc.
//
// Who accesses is an agent: a thread, the wgmma of a warp, the bulk stores of a warp, the bulk loads that one mbarrier counts; threads and warps
// are numbered on from block to block, mbarriers as they are initialized. Order comes from mbarriers, named barriers, barrier.cluster, __syncwarp,
// and from waiting for wgmma and bulk stores. What threads wrote, wgmma and TMA (the asynchronous proxy) have only if fence.proxy.async lies
// between (PTX ISA, "Proxies"). What threads wrote, another block of the cluster has only if fence.acq_rel.cta, or barrier.cluster, lies between: its
// barriers may be arrived at before. (PTX wants a fence of the cluster; kernels/backward.py says why not.) Threads may write in any order what is the same.
// What a thread reads in a row so long that an mbarrier's arrival, which does not wait for it, passes the last of it, must have a proxy fence behind it.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace happens_before {

using Clock = uint32_t;
constexpr int kAgents = 1152, kCell = 2;  // bytes that are not told apart
using Clocks = std::array<Clock, kAgents>;
inline size_t agents;  // that there are
inline bool several;   // blocks

// Of every agent, up to where its accesses happen before what a thread does next, and up to where the asynchronous proxy, and other blocks, have them.
struct Knowledge {
  Clocks before{}, through{}, beyond{};
  void take(const Knowledge& from) {
    for (size_t i = 0; i < agents; ++i) before[i] = std::max(before[i], from.before[i]);
    for (size_t i = 0; i < agents; ++i) through[i] = std::max(through[i], from.through[i]);
    for (size_t i = 0; several && i < agents; ++i) beyond[i] = std::max(beyond[i], from.beyond[i]);
  }
};

struct Access {
  size_t agent;
  Clock clock;  // of the agent, from 1; 0: none
};
struct Cell {
  Access write;
  std::vector<Access> reads;  // since the write, one an agent
};

inline std::vector<Cell> cells;
inline std::vector<Knowledge> knowledge;  // of the threads
inline std::vector<Clock> clocks;         // of the threads
inline std::vector<bool> loading;         // threads of whose reads some may not have been made yet
struct Barrier {
  const void* at;
  Clock phase = 0;
  Knowledge arriving, completed;
};
inline std::vector<Barrier> barriers;
struct Named {
  Knowledge arriving, completed;
};
inline std::vector<Named> named;    // 16 a block, one of the cluster
inline std::vector<Clocks> visits;  // of blocks: when the threads of others last came to their memory
struct Rewritten {  // by a write in no order with another: right if it writes the same, which shows when it is done
  size_t cell;
  unsigned char content[kCell];
};
inline std::vector<Rewritten> rewritten;
inline size_t threads, warps, of_block;  // of all blocks, those of a block
inline const unsigned char* memory;
inline char message[200];

inline size_t wgmma(int warp) { return threads + static_cast<size_t>(warp); }
inline size_t stores(int warp) { return threads + warps + static_cast<size_t>(warp); }
inline size_t loads(size_t barrier) { return threads + 2 * warps + barrier; }

// So many blocks of `count` threads and of so many bytes.
inline void begin(int count, int blocks, const unsigned char* shared, size_t bytes) {
  const auto number = static_cast<size_t>(blocks);
  several = number > 1;
  of_block = static_cast<size_t>(count), threads = number * of_block, warps = threads / 32, memory = shared;
  agents = threads + 2 * warps;
  cells.resize(number * bytes / kCell);
  for (Cell& cell : cells) cell.write = {0, 0}, cell.reads.clear();
  knowledge.assign(threads, Knowledge());
  clocks.assign(threads, 1);
  loading.assign(threads, false);
  barriers.clear(), rewritten.clear();
  named.assign(16 * number + 1, Named());
  visits.assign(number, Clocks());
}

inline const char* name(size_t agent, char* to, size_t size) {
  if (agent < threads) std::snprintf(to, size, "thread %zu", agent);
  else if (agent < threads + warps) std::snprintf(to, size, "wgmma of warp %zu", agent - threads);
  else if (agent < threads + 2 * warps) std::snprintf(to, size, "a bulk store of warp %zu", agent - threads - warps);
  else std::snprintf(to, size, "a bulk load of barrier %zu", agent - threads - 2 * warps);
  return to;
}
inline const char* report(size_t cell, bool wrote, size_t first, bool writes, size_t second, const char* lacks) {
  char a[40], b[40];
  std::snprintf(message, sizeof message, "shared memory at %zu is %s by %s and %s by %s, %s", cell * kCell, wrote ? "written" : "read",
                name(first, a, sizeof a), writes ? "written" : "read", name(second, b, sizeof b), lacks);
  return message;
}

// What the writes before this did wrong, if anything.
inline const char* settle() {
  for (const Rewritten& x : rewritten) {
    if (std::memcmp(x.content, memory + x.cell * kCell, kCell) != 0) return message;
  }
  rewritten.clear();
  return nullptr;
}

// An access by the agent, on behalf of a thread; what is wrong, if anything.
inline const char* access(unsigned address, int bytes, bool write, size_t agent, Clock clock, int thread) {
  if (const char* wrong = settle()) return wrong;
  const auto own = static_cast<size_t>(thread);
  const Knowledge& knows = knowledge[own];
  const auto ordered = [&](Access x) { return x.agent == own || knows.before[x.agent] >= x.clock; };
  for (size_t i = address / kCell; i <= (address + static_cast<unsigned>(bytes) - 1) / kCell; ++i) {
    Cell& cell = cells[i];
    if (const Access last = cell.write; !ordered(last)) {
      report(i, true, last.agent, write, agent, "in no order");
      if (!write || agent >= threads || last.agent >= threads) return message;
      Rewritten again{i, {}};
      std::memcpy(again.content, memory + i * kCell, kCell);
      rewritten.push_back(again);
    } else if (agent >= threads && last.agent < threads && knows.through[last.agent] < last.clock) {
      return report(i, true, last.agent, write, agent, "without a proxy fence");
    }
    if (write) {
      for (const Access& read : cell.reads) {
        if (!ordered(read)) return report(i, false, read.agent, true, agent, "in no order");
      }
      cell.write = {agent, clock}, cell.reads.clear();
    } else {
      const auto mine = std::find_if(cell.reads.begin(), cell.reads.end(), [&](Access x) { return x.agent == agent; });
      if (mine != cell.reads.end()) mine->clock = clock;
      else cell.reads.push_back({agent, clock});
    }
  }
  return nullptr;
}
// By a thread itself.
inline const char* access(unsigned address, int bytes, bool write, int thread) {
  return access(address, bytes, write, static_cast<size_t>(thread), clocks[static_cast<size_t>(thread)], thread);
}

// What another gets to know when it synchronises with this thread.
inline const Knowledge& release(int thread) {
  const auto own = static_cast<size_t>(thread);
  knowledge[own].before[own] = clocks[own]++;
  return knowledge[own];
}
inline void acquire(int thread, const Knowledge& from) { knowledge[static_cast<size_t>(thread)].take(from); }

inline void proxy_fence(int thread) {
  release(thread);
  loading[static_cast<size_t>(thread)] = false;
  Knowledge& knows = knowledge[static_cast<size_t>(thread)];
  for (size_t i = 0; i < agents; ++i) knows.through[i] = std::max(knows.through[i], knows.before[i]);
}

// Of what the thread has written or knows of, other blocks have it before they learn of anything that the thread does next.
inline void block_fence(int thread) {
  release(thread);
  Knowledge& knows = knowledge[static_cast<size_t>(thread)];
  for (size_t i = 0; i < agents; ++i) knows.beyond[i] = std::max(knows.beyond[i], knows.before[i]);
}

inline void meet_warp(int warp) {
  Knowledge all;
  for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) all.take(release(thread));
  for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) acquire(thread, all);
}
inline void arrive_named(int id, int thread) { named[static_cast<size_t>(id)].arriving.take(release(thread)); }
inline void complete_named(int id) {
  Named& barrier = named[static_cast<size_t>(id)];
  barrier.completed = barrier.arriving, barrier.arriving = Knowledge();
}
inline void leave_named(int id, int thread) { acquire(thread, named[static_cast<size_t>(id)].completed); }

inline const char* initialize_barrier(const void* at) {
  barriers.push_back({at});
  agents = loads(barriers.size());
  return agents > kAgents ? "more barriers than tests/happens_before.h has agents" : nullptr;
}
inline Barrier& barrier(const void* at) {
  return *std::find_if(barriers.begin(), barriers.end(), [&](const Barrier& x) { return x.at == at; });
}
inline size_t loads(const Barrier& barrier) { return loads(static_cast<size_t>(&barrier - barriers.data())); }
inline const char* arrive(const void* at, int thread) {
  if (loading[static_cast<size_t>(thread)]) {
    std::snprintf(message, sizeof message, "thread %d arrives at a barrier, without a proxy fence, and may still be reading", thread);
    return message;
  }
  barrier(at).arriving.take(release(thread));
  return nullptr;
}
inline void complete_phase(const void* at) {
  Barrier& of = barrier(at);
  of.arriving.before[loads(of)] = ++of.phase;
  of.completed = of.arriving;
}
inline void wait(const void* at, int thread) { acquire(thread, barrier(at).completed); }
inline const char* load(unsigned address, int bytes, const void* at, int thread) {
  const Barrier& of = barrier(at);
  return access(address, bytes, true, loads(of), of.phase + 1, thread);
}
// What lies there in another block's shared memory, a thread is about to read; what is wrong, if anything.
inline const char* reach(unsigned address, int bytes, int thread) {
  const auto own = static_cast<size_t>(thread);
  for (size_t i = address / kCell; i <= (address + static_cast<unsigned>(bytes) - 1) / kCell; ++i) {
    const Access last = cells[i].write;
    if (last.clock == 0 || last.agent >= threads || last.agent / of_block == own / of_block) continue;
    if (knowledge[own].beyond[last.agent] < last.clock) return report(i, true, last.agent, false, own, "without a fence of the block that wrote it");
  }
  return nullptr;
}
// A thread comes to a block's shared memory.
inline void visit(size_t block, int thread) {
  const auto own = static_cast<size_t>(thread);
  if (block != own / of_block) visits[block][own] = clocks[own];
}
// A block may be gone, and its shared memory with it, once its threads have ended; what is wrong, if anything.
inline const char* end() {
  for (size_t block = 0; block < visits.size(); ++block) {
    const auto first = knowledge.begin() + static_cast<std::ptrdiff_t>(block * of_block);
    for (size_t thread = 0; thread < threads; ++thread) {
      const auto before = [&](const Knowledge& x) { return x.before[thread] >= visits[block][thread]; };
      if (std::any_of(first, first + static_cast<std::ptrdiff_t>(of_block), before)) continue;
      std::snprintf(message, sizeof message, "block %zu of a cluster may end before thread %zu comes to its shared memory", block, thread);
      return message;
    }
  }
  return nullptr;
}
// A thread has waited for an agent's accesses up to this.
inline void waited(size_t agent, Clock clock, int thread) {
  Clock& before = knowledge[static_cast<size_t>(thread)].before[agent];
  before = std::max(before, clock);
}

}  // namespace happens_before
