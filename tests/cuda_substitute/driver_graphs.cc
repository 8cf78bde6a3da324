// SPDX-License-Identifier: Apache-2.0
//
// Captures of streams, and graphs. A graph here has only memory: a launch takes the memory, the memory stays for the
// next launch, and a trim of the device's graph memory gives the memory back.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

struct Graph {
  std::vector<GraphNode> nodes;
  bool instantiated = false;
};

struct GraphExec {
  Graph* graph = nullptr;  // becomes null when the graph is destroyed
  std::vector<GraphNode> nodes;
  bool auto_free = false;
};

// The memory of an allocation node. The address never changes.
struct GraphMemory {
  int device = 0;
  uint64_t bytes = 0;
  std::optional<Hold> hold;  // a launch sets the hold
  bool used = false;         // a launch has taken the memory, and no free has followed
  bool freed_by_owner = false;
  Clock::time_point busy_until;  // end of the last launch
};

struct HighMarks {
  uint64_t used = 0;
  uint64_t reserved = 0;
};

// REQUIRES: the driver's lock is held.
struct Graphs {
  std::map<const void*, std::unique_ptr<Graph>> graphs;
  std::map<const void*, std::unique_ptr<GraphExec>> execs;
  std::map<char*, GraphMemory> memory;
  std::map<int, HighMarks> high;
  uintptr_t last_node = 0;

  static Graphs& Get() {
    static auto* const graphs = new Graphs;
    return *graphs;
  }
  Graph* Find(CUgraph graph) {
    const auto it = graphs.find(graph);
    return it == graphs.end() ? nullptr : it->second.get();
  }
  GraphExec* Find(CUgraphExec exec) {
    const auto it = execs.find(exec);
    return it == execs.end() ? nullptr : it->second.get();
  }
  CUgraph Add(std::vector<GraphNode> nodes) {
    auto graph = std::make_unique<Graph>(Graph{.nodes = std::move(nodes)});
    auto* const handle = reinterpret_cast<CUgraph>(graph.get());
    graphs[graph.get()] = std::move(graph);
    return handle;
  }
  CUgraphNode NextNode() { return reinterpret_cast<CUgraphNode>(++last_node); }

  bool IsBusy(const GraphMemory& part) const { return part.used || part.busy_until > Clock::now(); }
  uint64_t Used(int device) const {
    uint64_t bytes = 0;
    for (const auto& [address, part] : memory) {
      if (part.device == device && part.hold.has_value() && IsBusy(part)) bytes += part.bytes;
    }
    return bytes;
  }
  uint64_t Reserved(int device) const {
    uint64_t bytes = 0;
    for (const auto& [address, part] : memory) {
      if (part.device == device && part.hold.has_value()) bytes += part.bytes;
    }
    return bytes;
  }
  void Mark(int device) {
    HighMarks& marks = high[device];
    marks.used = std::max(marks.used, Used(device));
    marks.reserved = std::max(marks.reserved, Reserved(device));
  }
};

GraphNode AllocationNode(Driver& driver, uint64_t wanted, int device) {
  const uint64_t bytes = RoundUp(wanted, kGranule);
  char* const address = driver.Reserve(bytes);
  Graphs::Get().memory[address] = {.device = device, .bytes = bytes, .hold = {}, .busy_until = {}};
  return {.address = address, .frees = false};
}

// Returns no node when `nodes` or the memory's own graph already frees the memory, or when `address` is no memory of a
// graph.
std::optional<GraphNode> FreeNode(const std::vector<GraphNode>& nodes, char* address) {
  const auto it = Graphs::Get().memory.find(address);
  if (it == Graphs::Get().memory.end() || it->second.freed_by_owner) return std::nullopt;
  bool owned = false;
  for (const GraphNode& node : nodes) {
    if (node.address != address) continue;
    if (node.frees) return std::nullopt;
    owned = true;
  }
  it->second.freed_by_owner = owned;
  return GraphNode{.address = address, .frees = true};
}

// Gives memory to `part`: the memory of an earlier launch, or idle memory of the same size, or new memory of the
// device.
bool Bind(Driver& driver, char* address, GraphMemory& part) {
  if (part.hold.has_value()) return true;
  for (auto& [other_address, other] : Graphs::Get().memory) {
    if (!other.hold.has_value() || other.device != part.device || other.bytes != part.bytes) continue;
    if (Graphs::Get().IsBusy(other)) continue;
    part.hold = std::exchange(other.hold, std::nullopt);
    driver.Forget(other_address);
    break;
  }
  if (!part.hold.has_value()) part.hold = driver.machine()->Allocate(driver.Physical(part.device), part.bytes);
  if (part.hold.has_value()) driver.MapAt(address, *part.hold, Kind::kGraph, kNoContext);
  return part.hold.has_value();
}

CUresult Launch(Driver& driver, const GraphExec& exec, const StreamState& stream) {
  Graphs& graphs = Graphs::Get();
  for (const GraphNode& node : exec.nodes) {
    GraphMemory& part = graphs.memory.at(node.address);
    if (node.frees || !part.used) continue;
    if (!exec.auto_free) return CUDA_ERROR_INVALID_VALUE;
    part.used = false;
  }
  // A launch takes all memory at once: no node of this launch gets memory that another node frees.
  std::set<int> devices;
  std::vector<std::pair<GraphMemory*, Clock::time_point>> before;
  for (const GraphNode& node : exec.nodes) {
    GraphMemory& part = graphs.memory.at(node.address);
    devices.insert(part.device);
    if (!node.frees && !Bind(driver, node.address, part)) {
      while (!before.empty()) {
        before.back().first->busy_until = before.back().second;
        before.pop_back();
      }
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    before.emplace_back(&part, part.busy_until);
    part.busy_until = Clock::time_point::max();
  }
  for (const GraphNode& node : exec.nodes) {
    GraphMemory& part = graphs.memory.at(node.address);
    part.used = !node.frees;
    part.busy_until = driver.DoneAt(stream);
  }
  for (const int device : devices) graphs.Mark(device);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CaptureAllocation(Driver& driver, CUdeviceptr* address, size_t bytes, int device, StreamState& stream) {
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  stream.captured.push_back(AllocationNode(driver, bytes, device));
  *address = AddressOf(stream.captured.back().address);
  return CUDA_SUCCESS;
}

CUresult CaptureFree(Driver& /*driver*/, char* address, StreamState& stream) {
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const std::optional<GraphNode> node = FreeNode(stream.captured, address);
  if (!node.has_value()) return CUDA_ERROR_INVALID_VALUE;
  stream.captured.push_back(*node);
  return CUDA_SUCCESS;
}

bool FreeOfGraph(Driver& driver, char* address, const StreamState* stream) {
  const auto it = Graphs::Get().memory.find(address);
  if (it == Graphs::Get().memory.end() || !it->second.used) return false;
  it->second.used = false;
  it->second.busy_until = stream == nullptr ? Clock::now() : driver.DoneAt(*stream);
  return true;
}

}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
using Lock = std::lock_guard<std::mutex>;

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return ContextCall("cuStreamIsCapturing", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = state->capture;
    return driver.CheckImplicit(*state, /*disturbs=*/false);
  });
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return ContextCall("cuStreamBeginCapture", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (state->capturing()) return CUDA_ERROR_ILLEGAL_STATE;
    state->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    state->capture_mode = mode;
    state->capture_thread = std::this_thread::get_id();
    state->captured.clear();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return ContextCall("cuStreamEndCapture", [&](Driver& driver) {
    *graph = nullptr;
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!state->capturing()) return CUDA_ERROR_ILLEGAL_STATE;
    if (state->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && state->capture_thread != std::this_thread::get_id()) {
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    const bool valid = state->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    state->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = Graphs::Get().Add(std::move(state->captured));
    return CUDA_SUCCESS;
  });
}

// Changes only the thread: no fault of a device prevents the call.
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(*mode, Thread().capture_mode);
  return CUDA_SUCCESS;
}

// ---- Graphs ----

CUresult cuGraphCreate(CUgraph* graph, unsigned int flags) {
  return Call("cuGraphCreate", [&](Driver& driver) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    *graph = Graphs::Get().Add({});
    return CUDA_SUCCESS;
  });
}

// Instances of the graph stay.
CUresult cuGraphDestroy(CUgraph graph) {
  return Call("cuGraphDestroy", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Graph* const found = Graphs::Get().Find(graph);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& [handle, exec] : Graphs::Get().execs) {
      if (exec->graph == found) exec->graph = nullptr;
    }
    Graphs::Get().graphs.erase(found);
    return CUDA_SUCCESS;
  });
}

// Nodes run in the order of their addition.
CUresult cuGraphAddMemAllocNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* /*dependencies*/, size_t /*count*/,
                                CUDA_MEM_ALLOC_NODE_PARAMS* parameters) {
  return Call("cuGraphAddMemAllocNode", [&](Driver& driver) {
    const CUmemLocation& location = parameters->poolProps.location;
    if (parameters->bytesize == 0 || parameters->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE ||
        location.type != CU_MEM_LOCATION_TYPE_DEVICE || !driver.IsDevice(location.id)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const Lock lock(driver.mu());
    Graph* const found = Graphs::Get().Find(graph);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    found->nodes.push_back(AllocationNode(driver, parameters->bytesize, location.id));
    parameters->dptr = AddressOf(found->nodes.back().address);
    *node = Graphs::Get().NextNode();
    return CUDA_SUCCESS;
  });
}

// Makes only nodes that allocate.
CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                        CUgraphNodeParams* parameters) {
  if (parameters->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC) return CUDA_ERROR_NOT_SUPPORTED;
  CUDA_MEM_ALLOC_NODE_PARAMS allocation = {.poolProps = parameters->alloc.poolProps,
                                           .accessDescs = parameters->alloc.accessDescs,
                                           .accessDescCount = parameters->alloc.accessDescCount,
                                           .bytesize = parameters->alloc.bytesize,
                                           .dptr = 0};
  const CUresult error = cuGraphAddMemAllocNode(node, graph, dependencies, count, &allocation);
  parameters->alloc.dptr = allocation.dptr;
  return error;
}

CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* /*edges*/, size_t count, CUgraphNodeParams* parameters) {
  return cuGraphAddNode(node, graph, dependencies, count, parameters);
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* /*dependencies*/, size_t /*count*/,
                               CUdeviceptr address) {
  return Call("cuGraphAddMemFreeNode", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Graph* const found = Graphs::Get().Find(graph);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::optional<GraphNode> added = FreeNode(found->nodes, PointerTo(address));
    if (!added.has_value()) return CUDA_ERROR_INVALID_VALUE;
    found->nodes.push_back(*added);
    *node = Graphs::Get().NextNode();
    return CUDA_SUCCESS;
  });
}

// Refuses a second instance of a graph that takes or frees memory.
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return Call("cuGraphInstantiate", [&](Driver& driver) {
    if ((flags & ~static_cast<unsigned long long>(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)) != 0) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    const Lock lock(driver.mu());
    Graph* const found = Graphs::Get().Find(graph);
    if (found == nullptr || (found->instantiated && !found->nodes.empty())) return CUDA_ERROR_INVALID_VALUE;
    auto made = std::make_unique<GraphExec>(GraphExec{.graph = found, .nodes = found->nodes, .auto_free = flags != 0});
    found->instantiated = true;
    *exec = reinterpret_cast<CUgraphExec>(made.get());
    Graphs::Get().execs[made.get()] = std::move(made);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return ContextCall("cuGraphLaunch", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const GraphExec* const found = Graphs::Get().Find(exec);
    const StreamState* const state = driver.Stream(stream);
    if (found == nullptr || state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return Launch(driver, *found, *state);
  });
}

// The instance's memory stays with the device's graphs.
CUresult cuGraphExecDestroy(CUgraphExec exec) {
  return Call("cuGraphExecDestroy", [&](Driver& driver) {
    const Lock lock(driver.mu());
    GraphExec* const found = Graphs::Get().Find(exec);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (found->graph != nullptr) found->graph->instantiated = false;
    Graphs::Get().execs.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  return DeviceCall("cuDeviceGetGraphMemAttribute", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    Graphs& graphs = Graphs::Get();
    const uint64_t values[] = {graphs.Used(device), graphs.high[device].used, graphs.Reserved(device),
                               graphs.high[device].reserved};
    if (attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(value, &values[attribute], sizeof values[0]);
    return CUDA_SUCCESS;
  });
}

// Accepts only 0 for the highest values, which then become the current values.
CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  return DeviceCall("cuDeviceSetGraphMemAttribute", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    Graphs& graphs = Graphs::Get();
    uint64_t bytes = 0;
    std::memcpy(&bytes, value, sizeof bytes);
    if (bytes != 0) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) {
      graphs.high[device].used = graphs.Used(device);
    } else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) {
      graphs.high[device].reserved = graphs.Reserved(device);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  return DeviceCall("cuDeviceGraphMemTrim", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    for (auto& [address, part] : Graphs::Get().memory) {
      if (part.device != device || !part.hold.has_value() || Graphs::Get().IsBusy(part)) continue;
      driver.Forget(address);
      driver.machine()->Release(*part.hold, /*freed=*/true);
      part.hold.reset();
    }
    return CUDA_SUCCESS;
  });
}
