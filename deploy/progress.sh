# SPDX-License-Identifier: Apache-2.0
#
# Shows people the progress of a long step. Source this file in bash.

# clock START: prints minutes and seconds since START, a value of $SECONDS.
clock() { printf '%d:%02d' $(((SECONDS - $1) / 60)) $(((SECONDS - $1) % 60)); }

# progress TEXT: on a terminal, TEXT replaces the last TEXT. Otherwise TEXT is a new line, every ten seconds at most.
progress_printed=-10
progress() {
  if [ -t 1 ]; then
    printf '\r  %s\033[K' "$1"
  elif [ $((SECONDS - progress_printed)) -ge 10 ]; then
    printf '  %s\n' "$1"
    progress_printed=$SECONDS
  fi
}

# progress_end TEXT: prints the step's last line.
progress_end() {
  if [ -t 1 ]; then printf '\r\033[K'; fi
  printf '  %s\n' "$1"
  progress_printed=-10
}
