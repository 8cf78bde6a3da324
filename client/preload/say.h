/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines for people, on the program's original standard error.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_SAY_H_
#define VRAMBROKER_CLIENT_PRELOAD_SAY_H_

enum { MESSAGE_BYTES = 1024 };

/* Never waits: without a reader, the line is lost. Never raises SIGPIPE, and keeps errno. A file opened by the program
 * under standard error's number gets nothing, unless it is also standard output or is opened to append: then the
 * program keeps a log there. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

#endif /* VRAMBROKER_CLIENT_PRELOAD_SAY_H_ */
