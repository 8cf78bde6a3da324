// SPDX-License-Identifier: Apache-2.0
//
// Makes a machine for the driver's substitute, with two GPUs of 1 GiB. Usage: make_machine EMPTY_FOLDER
#include "tests/cuda_substitute/substitute.h"

int main(int, char** argv) {
  vrambroker::cuda_substitute::MakeMachine(argv[1], {.devices = 2});
  return 0;
}
