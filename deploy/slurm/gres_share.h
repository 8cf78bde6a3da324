/* SPDX-License-Identifier: Apache-2.0
 *
 * Amount of a generic resource given to a job by Slurm on a node. */
#ifndef VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_
#define VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `details` is a node's gres_detail_str from slurm_load_job(), such as "gpu:1(IDX:0),vram(CNT:8192)"; may be NULL.
 * *count is the total of `gres` over all types; 0: none. False: `details` is unreadable. */
bool vrambroker_gres_count(const char* details, const char* gres, uint64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_ */
