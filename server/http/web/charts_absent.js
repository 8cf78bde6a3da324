// SPDX-License-Identifier: Apache-2.0
// In the place of the plotting library where the daemon was built without npm.
export default null;
