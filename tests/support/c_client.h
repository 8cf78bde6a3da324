/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of c_client share. */
#ifndef VRAMBROKER_TESTS_SUPPORT_C_CLIENT_H_
#define VRAMBROKER_TESTS_SUPPORT_C_CLIENT_H_

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <vrambroker/vrambroker.h>

#define CHECK(condition)                                                                            \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      fprintf(stderr, "%s:%d: %s; last error: %s: %s\n", __FILE__, __LINE__, #condition,            \
              vrambroker_code_name(vrambroker_last_error_code()), vrambroker_last_error_message()); \
      _exit(1);                                                                                     \
    }                                                                                               \
  } while (0)
#define CHECK_OK(call) CHECK((call) == VRAMBROKER_OK)
/* Checks that the call fails with `code` and a message that contains `text`. */
#define CHECK_FAILS(call, code, text)                             \
  do {                                                            \
    CHECK((call) == (code));                                      \
    CHECK(vrambroker_last_error_code() == (code));                \
    CHECK(strstr(vrambroker_last_error_message(), text) != NULL); \
  } while (0)

#define MIB (UINT64_C(1) << 20)

void run_oom_report_leased(void);
void run_oom_report_remote(void);

#endif /* VRAMBROKER_TESTS_SUPPORT_C_CLIENT_H_ */
