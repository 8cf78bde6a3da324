# SPDX-License-Identifier: Apache-2.0
#
# Messages and waits of scripts that test. Source this file. A script may define a function `explain`, which adds the
# script's knowledge to a failure.
say() { printf '\n== %s\n' "$*"; }
fail() {
  printf '\n%s: FAILED: %s\n' "$(basename "$0")" "$*" >&2
  if declare -F explain > /dev/null; then explain >&2; fi
  exit 1
}
# until_true COMMAND...: waits up to ten minutes until the command succeeds. The command may write nothing.
until_true() {
  for _ in $(seq 6000); do
    if "$@"; then return; fi
    sleep 0.1
  done
  fail "waited for ten minutes: $*"
}
# names_folders GREP_ARGUMENTS...: lists files that name $source_dir or $work. The same letters in other paths do not
# count.
names_folders() { grep -rlP "(^|[\\s\"';:=]|-[IL])(\\Q$source_dir\\E|\\Q$work\\E)(/|[\\s\"';:]|$)" "$@"; }
