# SPDX-License-Identifier: Apache-2.0
#
# Makes root folders of Debian with mmdebstrap, for scripts that test in such folders. Source this file after shell.sh.
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

# in_own_namespaces SIZE "$@": runs the calling script again, in a new mount namespace and a new pid namespace, and ends
# with the inner script. The inner script's first argument is "inside", the second a memory file system of SIZE; the
# given arguments follow. An interrupted script leaves no mount, no process, and no folder, except an empty folder after
# SIGKILL.
in_own_namespaces() {
  local size=$1
  shift
  if [ "$(id -u)" -ne 0 ]; then
    echo "Skipped: making root folders and entering them needs root."
    exit
  fi
  command -v mmdebstrap > /dev/null || fail "needs mmdebstrap: deploy/packages.sh ci"
  work=$(mktemp -d) child=""
  # unshare ignores SIGTERM.
  trap '[ -z "$child" ] || kill -KILL $child 2> /dev/null || true; wait; rmdir "$work"' EXIT
  trap 'exit 130' INT TERM HUP
  # shellcheck disable=SC2016  # for the inner shell
  setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child sh -e -c '
    mount -t tmpfs -o "size=$1,mode=755" tmpfs "$3"
    mount -t proc proc /proc
    script=$2 work=$3
    shift 3
    exec "$script" inside "$work" "$@"' sh "$size" "$(realpath "$0")" "$work" "$@" &
  child=$!
  wait $child
  exit
}
