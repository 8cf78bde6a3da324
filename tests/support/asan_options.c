/* SPDX-License-Identifier: Apache-2.0
 *
 * Options of AddressSanitizer for programs that load libvrambroker.so.
 *
 * LeakSanitizer wants to know where the C library has put the thread-local variables of a loaded library. LLVM 14
 * guesses (sanitizer_tls_get_addr.cpp): LLVM takes an address 16 bytes into a page for an allocation of glibc 2.19, and
 * reads the allocation's size and start from the bytes before the address. When the allocator happens to put the
 * variables there, these bytes have any value, and the program ends with "Tracer caught signal 11". Without the guess,
 * LeakSanitizer still finds the variables: the thread points to the variables.
 */
const char* __asan_default_options(void);

const char* __asan_default_options(void) {
  return "intercept_tls_get_addr=0";
}
