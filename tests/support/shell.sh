# SPDX-License-Identifier: Apache-2.0
#
# What scripts that test say, and how they wait. To be sourced. A script's function `explain`, if it has one, adds to a failure
# what the script knows.
say() { printf '\n== %s\n' "$*"; }
fail() {
  printf '\n%s: FAILED: %s\n' "$(basename "$0")" "$*" >&2
  if declare -F explain > /dev/null; then explain >&2; fi
  exit 1
}
# until_true COMMAND...: waits for it, for ten minutes. It may write nothing.
until_true() {
  for _ in $(seq 6000); do
    if "$@"; then return; fi
    sleep 0.1
  done
  fail "waited for ten minutes: $*"
}
# names_folders GREP_ARGUMENTS...: the files that name $source_dir or $work. The same letters may be a part of other paths.
names_folders() { grep -rlP "(^|[\\s\"';:=]|-[IL])(\\Q$source_dir\\E|\\Q$work\\E)(/|[\\s\"';:]|$)" "$@"; }
