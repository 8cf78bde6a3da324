// SPDX-License-Identifier: Apache-2.0
//
// Labels of the claims that the plugin makes. They are all that it remembers: the daemon keeps them over its restarts
// and the plugin's.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_

#include <cstddef>

namespace vrambroker::kubernetes {

inline constexpr char kResourceLabel[] = "kubernetes_resource";  // its presence: the claim is the plugin's
inline constexpr char kDeviceLabel[] = "kubernetes_device";      // uuid
inline constexpr char kUnitsLabel[] = "kubernetes_units";        // "0-7,12": those that fit, always some
// From the kubelet's list.
inline constexpr char kNamespaceLabel[] = "namespace";
inline constexpr char kPodLabel[] = "pod";
inline constexpr char kContainerLabel[] = "container";

inline constexpr size_t kMostLabelBytes = 128;  // of a value: ClaimTerms

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_LABELS_H_
