// SPDX-License-Identifier: Apache-2.0
//
// CUDA arrays, which have no address and no content.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

struct ArrayState {
  std::optional<Hold> hold;  // is empty where memory is mapped later
  uint64_t bytes = 0;
  int context = kNoContext;
  bool mipmapped = false;
  bool deferred = false;  // has the flag CUDA_ARRAY3D_DEFERRED_MAPPING
};

// REQUIRES: the driver's lock is held.
std::map<const void*, std::unique_ptr<ArrayState>>& Arrays() {
  static auto* const arrays = new std::map<const void*, std::unique_ptr<ArrayState>>;
  return *arrays;
}

// Returns null when `array` is no array of this sort.
ArrayState* FindArray(const void* array, bool mipmapped) {
  const auto it = Arrays().find(array);
  return it == Arrays().end() || it->second->mipmapped != mipmapped ? nullptr : it->second.get();
}

// Returns the bits of an element; 0 for a format that the substitute does not know.
uint64_t ElementBits(CUarray_format format, unsigned int channels) {
  switch (static_cast<int>(format)) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return uint64_t{8} * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return uint64_t{16} * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return uint64_t{32} * channels;
    case 0x91:  // CU_AD_FORMAT_BC1_UNORM
      return 4;
    case 0xb0:  // CU_AD_FORMAT_NV12
      return 12;
    case 0xc2:  // CU_AD_FORMAT_UNORM_INT8X4
      return 32;
    default:
      return 0;
  }
}

// Each level of a mipmapped array has half the extents of the level before. The layers of a layered array stay.
uint64_t BytesOf(const CUDA_ARRAY3D_DESCRIPTOR& descriptor, unsigned int levels) {
  const bool layered = (descriptor.Flags & CUDA_ARRAY3D_LAYERED) != 0;
  uint64_t elements = 0;
  for (unsigned int level = 0; level < std::min(levels, 32u); ++level) {
    const auto extent = [level](size_t of_first) { return std::max<uint64_t>(of_first >> level, 1); };
    elements += extent(descriptor.Width) * extent(descriptor.Height) *
                (layered ? std::max<uint64_t>(descriptor.Depth, 1) : extent(descriptor.Depth));
  }
  return RoundUp(elements * ElementBits(descriptor.Format, descriptor.NumChannels) / 8, kGranule);
}

template <typename Array>
CUresult Create(const char* function, Array* array, const CUDA_ARRAY3D_DESCRIPTOR& descriptor, unsigned int levels,
                bool mipmapped) {
  return UnsafeCall(function, [&](Driver& driver) {
    const unsigned int channels = descriptor.NumChannels;
    if (descriptor.Width == 0 || levels == 0 || channels == 0 || channels > 4) return CUDA_ERROR_INVALID_VALUE;
    if (ElementBits(descriptor.Format, channels) == 0) return CUDA_ERROR_INVALID_VALUE;
    auto state = std::make_unique<ArrayState>();
    state->bytes = BytesOf(descriptor, levels);
    state->context = CurrentContext();
    state->mipmapped = mipmapped;
    state->deferred = (descriptor.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING) != 0;
    if (!state->deferred && (descriptor.Flags & CUDA_ARRAY3D_SPARSE) == 0) {
      state->hold = driver.machine()->Allocate(driver.Physical(CurrentDevice()), state->bytes);
      if (!state->hold.has_value()) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *array = reinterpret_cast<Array>(state.get());
    const std::lock_guard<std::mutex> lock(driver.mu());
    Arrays()[state.get()] = std::move(state);
    return CUDA_SUCCESS;
  });
}

CUresult Destroy(const char* function, const void* array, bool mipmapped) {
  return UnsafeCall(function, [&](Driver& driver) {
    const std::lock_guard<std::mutex> lock(driver.mu());
    const ArrayState* const state = FindArray(array, mipmapped);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (state->hold.has_value()) driver.machine()->Release(*state->hold, /*freed=*/true);
    UnmapTiles(driver, array);
    Arrays().erase(array);
    return CUDA_SUCCESS;
  });
}

CUresult Requirements(const char* function, CUDA_ARRAY_MEMORY_REQUIREMENTS* requirements, const void* array,
                      CUdevice device, bool mipmapped) {
  return DeviceCall(function, device, [&](Driver& driver) {
    const std::lock_guard<std::mutex> lock(driver.mu());
    const ArrayState* const state = FindArray(array, mipmapped);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!state->deferred) return CUDA_ERROR_INVALID_VALUE;
    *requirements = {.size = state->bytes, .alignment = kGranule, .reserved = {}};
    return CUDA_SUCCESS;
  });
}

}  // namespace

void EndArrays(Driver& driver, int context) {
  for (auto it = Arrays().begin(); it != Arrays().end();) {
    const ArrayState& state = *it->second;
    if (state.context != context) {
      ++it;
      continue;
    }
    if (state.hold.has_value()) driver.machine()->Release(*state.hold, /*freed=*/true);
    UnmapTiles(driver, it->first);
    it = Arrays().erase(it);
  }
}

}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions

CUresult cuArrayCreate_v2(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* descriptor) {
  return Create("cuArrayCreate", array,
                {.Width = descriptor->Width,
                 .Height = descriptor->Height,
                 .Depth = 0,
                 .Format = descriptor->Format,
                 .NumChannels = descriptor->NumChannels,
                 .Flags = 0},
                1, /*mipmapped=*/false);
}

CUresult cuArrayCreate(CUarray* array, const ArrayDescriptor32* descriptor) {
  const CUDA_ARRAY_DESCRIPTOR same{.Width = descriptor->Width,
                                   .Height = descriptor->Height,
                                   .Format = descriptor->Format,
                                   .NumChannels = descriptor->NumChannels};
  return cuArrayCreate_v2(array, &same);
}

CUresult cuArray3DCreate(CUarray* array, const Array3dDescriptor32* descriptor) {
  const CUDA_ARRAY3D_DESCRIPTOR same{.Width = descriptor->Width,
                                     .Height = descriptor->Height,
                                     .Depth = descriptor->Depth,
                                     .Format = descriptor->Format,
                                     .NumChannels = descriptor->NumChannels,
                                     .Flags = descriptor->Flags};
  return cuArray3DCreate_v2(array, &same);
}

CUresult cuArray3DCreate_v2(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor) {
  return Create("cuArray3DCreate", array, *descriptor, 1, /*mipmapped=*/false);
}

CUresult cuArrayDestroy(CUarray array) {
  return Destroy("cuArrayDestroy", array, /*mipmapped=*/false);
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* requirements, CUarray array, CUdevice device) {
  return Requirements("cuArrayGetMemoryRequirements", requirements, array, device, /*mipmapped=*/false);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray* array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor,
                                unsigned int levels) {
  return Create("cuMipmappedArrayCreate", array, *descriptor, levels, /*mipmapped=*/true);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
  return Destroy("cuMipmappedArrayDestroy", array, /*mipmapped=*/true);
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* requirements, CUmipmappedArray array,
                                               CUdevice device) {
  return Requirements("cuMipmappedArrayGetMemoryRequirements", requirements, array, device, /*mipmapped=*/true);
}
