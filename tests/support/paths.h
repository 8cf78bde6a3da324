// SPDX-License-Identifier: Apache-2.0
//
// The paths of this build's programs and of the source tree's files. The path of a program that is not built is empty.
//
// A single generated file (paths.cc.in) holds the values. No other compiled file depends on a folder's name, and a
// compiler cache serves every clone.
#ifndef VRAMBROKER_TESTS_SUPPORT_PATHS_H_
#define VRAMBROKER_TESTS_SUPPORT_PATHS_H_

namespace vrambroker::testing_support::paths {

extern const char* const kSourceDir;
extern const char* const kGoldenDir;

extern const char* const kDaemon;
extern const char* const kVramctl;
extern const char* const kTestClient;
extern const char* const kDevicePlugin;
extern const char* const kDemo;  // is a program of deploy/demo and deploy/examples
extern const char* const kFragmentation;
extern const char* const kJob;
extern const char* const kStep8847;
extern const char* const kWithoutPidfds;  // runs another program

// Libraries named libcuda.so.1.
extern const char* const kCudaSubstitute;
extern const char* const kPlainCudaSubstitute;  // has no sanitizers; libnvidia-ml.so.1 is in the same folder
extern const char* const kOldDriver;            // lacks most functions that vrambroker calls

extern const char* const kNvmlSubstitute;  // is named libnvidia-ml.so.1

// The C library, the library's core, and programs that use the library.
extern const char* const kCLibrary;
extern const char* const kCCore;
extern const char* const kCClient;
extern const char* const kCClientOwnGrpc;
extern const char* const kCClientCopies;
extern const char* const kOtherCore;  // plays a core of another version
extern const char* const kCExample;

// The library that `vramctl run` preloads, and the test programs of tests/preload.
extern const char* const kPreload;
extern const char* const kPreloadPackingDriver;  // is another libcuda.so.1
extern const char* const kPreloadOther;          // is another library for LD_PRELOAD
extern const char* const kPreloadProbe;
extern const char* const kPreloadProbeLinked;
extern const char* const kPreloadBenchProgram;
extern const char* const kEmptyDriver;  // is named libcuda.so.1; calls cost no time

extern const char* const kPython;
extern const char* const kTmux;

}  // namespace vrambroker::testing_support::paths

#endif  // VRAMBROKER_TESTS_SUPPORT_PATHS_H_
