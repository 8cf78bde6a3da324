/* SPDX-License-Identifier: Apache-2.0
 *
 * How much of a generic resource Slurm has given a job on one node. */
#ifndef VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_
#define VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `details` is a node's gres_detail_str of slurm_load_job(), such as "gpu:1(IDX:0),vram(CNT:8192)"; may be NULL.
 * *count is all that it has of `gres`, of every type; 0: none. False: it cannot be read. */
bool vrambroker_gres_count(const char* details, const char* gres, uint64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* VRAMBROKER_DEPLOY_SLURM_GRES_SHARE_H_ */
