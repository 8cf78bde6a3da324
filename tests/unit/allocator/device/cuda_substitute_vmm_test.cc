// SPDX-License-Identifier: Apache-2.0
//
// Memory by handle in the substitute of NVIDIA's driver. The memory lives as long as a handle, a mapping, an import or
// an exported file.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

using MemoryHandle = CUmemGenericAllocationHandle;

CUmemAllocationProp Properties(CUmemLocationType type = CU_MEM_LOCATION_TYPE_DEVICE,
                               CUmemAllocationHandleType shared = CU_MEM_HANDLE_TYPE_NONE) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = shared;
  properties.location = {.type = type, .id = 0};
  return properties;
}
MemoryHandle Create(const CUmemAllocationProp& properties, uint64_t bytes = kBytes) {
  MemoryHandle handle = 0;
  if (cuMemCreate(&handle, bytes, &properties, 0) != CUDA_SUCCESS) _exit(103);
  return handle;
}
CUdeviceptr Reserve(uint64_t bytes) {
  CUdeviceptr address = 0;
  if (cuMemAddressReserve(&address, bytes, 0, 0, 0) != CUDA_SUCCESS) _exit(104);
  return address;
}
CUresult Allow(CUdeviceptr address, uint64_t bytes) {
  const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return cuMemSetAccess(address, bytes, &access, 1);
}
int AsFile(MemoryHandle handle) {
  int fd = -1;
  if (cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS) {
    _exit(105);
  }
  return fd;
}
CUresult Import(MemoryHandle* handle, int fd) {
  return cuMemImportFromShareableHandle(handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

// A file descriptor that one process passes to another.
class Passing {
 public:
  Passing() {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets_) != 0) std::abort();
  }
  ~Passing() {
    for (const int socket : sockets_) close(socket);
  }
  Passing(const Passing&) = delete;
  Passing& operator=(const Passing&) = delete;

  void Send(int fd) {
    msghdr message = Message();
    cmsghdr* const control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
    if (sendmsg(sockets_[1], &message, 0) < 0) std::abort();
  }
  int Receive() {
    msghdr message = Message();
    int fd = -1;
    if (recvmsg(sockets_[0], &message, 0) < 0 || CMSG_FIRSTHDR(&message) == nullptr) std::abort();
    std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
  }

 private:
  msghdr Message() {
    part_ = {.iov_base = &byte_, .iov_len = 1};
    msghdr message = {};
    message.msg_iov = &part_;
    message.msg_iovlen = 1;
    message.msg_control = control_;
    message.msg_controllen = sizeof control_;
    return message;
  }

  int sockets_[2] = {-1, -1};
  char byte_ = 'x';
  iovec part_ = {};
  alignas(cmsghdr) char control_[CMSG_SPACE(sizeof(int))] = {};
};

class CudaSubstituteVmmTest : public CudaSubstituteTest {
 protected:
  uint64_t Used() { return UsedBytes(machine_, 0); }
};

TEST_F(CudaSubstituteVmmTest, OnlyMemoryOfTheDeviceTakesMemoryOfTheDevice) {
  const Process process(
      [&] {
        if (cuInit(0) != CUDA_SUCCESS) return 1;
        size_t granule = 0;
        MemoryHandle handle = 0;
        CUmemAllocationProp properties = Properties();
        if (cuMemGetAllocationGranularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS) {
          return 2;
        }
        if (cuMemCreate(&handle, granule / 2, &properties, 0) != CUDA_ERROR_INVALID_VALUE) return 3;
        for (const CUmemLocationType host : {CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA}) {
          if (cuMemRelease(Create(Properties(host), 2 * kAll)) != CUDA_SUCCESS || Used() != 0) return 4;
        }
        handle = Create(Properties(), kAll);
        if (Used() != kAll) return 5;
        MemoryHandle second = 0;
        if (cuMemCreate(&second, granule, &properties, 0) != CUDA_ERROR_OUT_OF_MEMORY) return 6;
        properties.location.id = 2;
        if (cuMemCreate(&second, granule, &properties, 0) != CUDA_ERROR_INVALID_DEVICE) return 7;
        if (cuMemRelease(handle) != CUDA_SUCCESS || Used() != 0) return 8;
        return cuMemRelease(handle) == CUDA_ERROR_INVALID_VALUE ? 0 : 9;
      },
      kNoGpu);
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteVmmTest, MemoryLivesWhileAHandleOrAMappingDoes) {
  const Process process([&] {
    const uint64_t before = Used();
    const CUdeviceptr address = Reserve(3 * kBytes);
    const MemoryHandle handle = Create(Properties());
    if (cuMemMap(address + 1, kBytes, 0, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 1;
    if (cuMemMap(address + 3 * kBytes, kBytes, 0, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 2;
    if (cuMemMap(address, 2 * kBytes, 0, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 3;
    for (const CUdeviceptr at : {address, address + 2 * kBytes}) {
      if (cuMemMap(at, kBytes, 0, handle, 0) != CUDA_SUCCESS) return 4;
    }
    if (cuMemMap(address, kBytes, 0, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 5;
    if (cuMemRelease(handle) != CUDA_SUCCESS || Used() != before + kBytes) return 6;
    if (cuMemMap(address + kBytes, kBytes, 0, handle, 0) != CUDA_ERROR_INVALID_VALUE) return 7;
    MemoryHandle again = 0;
    if (cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(address + 5)) != CUDA_SUCCESS) return 8;
    if (again != handle) return 9;
    if (cuMemAddressFree(address, 3 * kBytes) != CUDA_ERROR_INVALID_VALUE) return 10;
    if (cuMemUnmap(address, 3 * kBytes) != CUDA_ERROR_INVALID_VALUE) return 11;
    if (cuMemUnmap(address, kBytes) != CUDA_SUCCESS || cuMemUnmap(address + 2 * kBytes, kBytes) != CUDA_SUCCESS) {
      return 12;
    }
    if (Used() != before + kBytes || cuMemRelease(again) != CUDA_SUCCESS || Used() != before) return 13;
    if (cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(address)) != CUDA_ERROR_INVALID_VALUE) return 14;
    return cuMemAddressFree(address, 3 * kBytes) == CUDA_SUCCESS ? 0 : 15;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteVmmTest, MappedMemoryNeedsAccess) {
  const Process process([&] {
    const CUdeviceptr address = Reserve(2 * kBytes);
    for (const CUdeviceptr at : {address, address + kBytes}) {
      if (cuMemMap(at, kBytes, 0, Create(Properties()), 0) != CUDA_SUCCESS) return 1;
    }
    char byte = 'x';
    if (cuMemcpyHtoD_v2(address, &byte, 1) != CUDA_ERROR_INVALID_VALUE) return 2;
    if (Allow(address, 3 * kBytes) != CUDA_ERROR_INVALID_VALUE || Allow(address, 2 * kBytes) != CUDA_SUCCESS) return 3;
    if (cuMemcpyHtoD_v2(address + kBytes, &byte, 1) != CUDA_SUCCESS) return 4;
    byte = 0;
    if (cuMemcpyDtoH_v2(&byte, address + kBytes, 1) != CUDA_SUCCESS || byte != 'x') return 5;
    return cuMemUnmap(address, 2 * kBytes) == CUDA_SUCCESS ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteVmmTest, ItOutlivesItsContext) {
  const Process process([&] {
    const MemoryHandle handle = Create(Properties());
    if (cuDevicePrimaryCtxReset_v2(0) != CUDA_SUCCESS || Used() != kBytes) return 1;
    return cuMemRelease(handle) == CUDA_SUCCESS && Used() == 0 ? 0 : 2;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteVmmTest, AnImportOutlivesItsExporter) {
  Passing passing;
  Passing imported;
  const Process owner([&] {
    const CUmemAllocationProp shared =
        Properties(CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const MemoryHandle handle = Create(shared);
    const CUdeviceptr address = Reserve(kBytes);
    const char byte = 's';
    if (cuMemMap(address, kBytes, 0, handle, 0) != CUDA_SUCCESS || Allow(address, kBytes) != CUDA_SUCCESS) return 1;
    if (cuMemcpyHtoD_v2(address, &byte, 1) != CUDA_SUCCESS) return 2;
    int none = -1;
    if (cuMemExportToShareableHandle(&none, Create(Properties()), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) !=
        CUDA_ERROR_INVALID_VALUE) {
      return 3;
    }
    passing.Send(AsFile(handle));
    pause();
    return 4;
  });
  const Process user([&] {
    const int fd = passing.Receive();
    MemoryHandle first = 0;
    MemoryHandle second = 0;
    if (Import(&first, 0) != CUDA_ERROR_INVALID_VALUE) return 1;
    if (Import(&first, fd) != CUDA_SUCCESS || Import(&second, fd) != CUDA_SUCCESS) return 2;
    close(fd);
    imported.Send(STDOUT_FILENO);  // the import is done
    AwaitGo();
    const CUdeviceptr address = Reserve(kBytes);
    char byte = 0;
    if (cuMemMap(address, kBytes, 0, first, 0) != CUDA_SUCCESS || Allow(address, kBytes) != CUDA_SUCCESS) return 3;
    if (cuMemcpyDtoH_v2(&byte, address, 1) != CUDA_SUCCESS || byte != 's') return 4;
    if (cuMemRelease(first) != CUDA_SUCCESS || cuMemRelease(second) != CUDA_SUCCESS) return 5;
    if (cuMemUnmap(address, kBytes) != CUDA_SUCCESS) return 6;
    return cuMemMap(address, kBytes, 0, first, 0) == CUDA_ERROR_INVALID_VALUE ? 0 : 7;
  });
  close(imported.Receive());
  owner.Kill();
  EXPECT_EQ(Used(), kContext + kBytes);
  Go();
  EXPECT_EQ(user.Wait(), 0);
  EXPECT_EQ(Used(), 0u);
}

TEST_F(CudaSubstituteVmmTest, AnExportedFileHoldsTheMemory) {
  for (const bool killed : {false, true}) {
    SCOPED_TRACE(killed ? "the owner is killed" : "the owner releases it");
    Passing passing;
    const Process owner([&] {
      const MemoryHandle handle =
          Create(Properties(CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
      const int fd = AsFile(handle);
      passing.Send(fd);
      if (killed) AwaitGo();
      close(fd);
      return static_cast<int>(cuMemRelease(handle));
    });
    const int fd = passing.Receive();
    if (killed) {
      owner.Kill();
    } else {
      EXPECT_EQ(owner.Wait(), 0);
    }
    EXPECT_EQ(Used(), kBytes);
    close(fd);
    EXPECT_EQ(Used(), 0u);
  }
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
