/* SPDX-License-Identifier: Apache-2.0
 *
 * Options of AddressSanitizer for programs that load libvrambroker.so.
 *
 * LeakSanitizer wants to know where the C library has put the thread-local variables of a loaded library. LLVM 14
 * guesses: an address of 16 bytes behind the beginning of a page is taken for one of glibc 2.19's, whose length and
 * beginning stand before it (sanitizer_tls_get_addr.cpp). Wherever the allocator happens to put them there, it reads
 * what is not mapped and ends the program: "Tracer caught signal 11". Without the guess it finds them all the same, as
 * memory that the thread points to.
 */
const char* __asan_default_options(void);

const char* __asan_default_options(void) {
  return "intercept_tls_get_addr=0";
}
