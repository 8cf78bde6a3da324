// SPDX-License-Identifier: Apache-2.0
//
// Labels of claims made by the plugin. Labels are the plugin's only memory: the daemon keeps labels over restarts of
// daemon and plugin.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_

#include <cstddef>

namespace vrambroker::kubernetes {

inline constexpr char kResourceLabel[] = "kubernetes_resource";  // present on the plugin's claims only
inline constexpr char kDeviceLabel[] = "kubernetes_device";      // uuid
inline constexpr char kUnitsLabel[] = "kubernetes_units";        // "0-7,12": as many as fit, never empty
// From the kubelet's list.
inline constexpr char kNamespaceLabel[] = "namespace";
inline constexpr char kPodLabel[] = "pod";
inline constexpr char kContainerLabel[] = "container";

inline constexpr size_t kMostLabelBytes = 128;  // of a value: ClaimTerms

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_
