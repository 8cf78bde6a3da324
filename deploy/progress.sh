# SPDX-License-Identifier: Apache-2.0
#
# How far a long step is, for people. To be sourced by bash.

# clock START: minutes and seconds since START, a value of $SECONDS.
clock() { printf '%d:%02d' $(((SECONDS - $1) / 60)) $(((SECONDS - $1) % 60)); }

# progress TEXT: on a terminal TEXT replaces the last one; elsewhere it is a line of its own, at most every ten seconds.
progress_printed=-10
progress() {
  if [ -t 1 ]; then
    printf '\r  %s\033[K' "$1"
  elif [ $((SECONDS - progress_printed)) -ge 10 ]; then
    printf '  %s\n' "$1"
    progress_printed=$SECONDS
  fi
}

# progress_end TEXT: the last word.
progress_end() {
  if [ -t 1 ]; then printf '\r\033[K'; fi
  printf '  %s\n' "$1"
  progress_printed=-10
}
