/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_
#define VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_

void handles_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_ */
