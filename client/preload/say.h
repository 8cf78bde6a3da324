/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines for people, on the standard error that the program was started with.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_SAY_H_
#define VRAMBROKER_CLIENT_PRELOAD_SAY_H_

enum { MESSAGE_BYTES = 1024 };

/* Never waits: where nobody reads, the line is lost. Never raises SIGPIPE, and leaves errno alone. A file that the
 * program has opened itself under the number of standard error gets nothing, unless standard output is the same file or
 * the file is one to append to: then the program keeps a log in it. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

#endif /* VRAMBROKER_CLIENT_PRELOAD_SAY_H_ */
