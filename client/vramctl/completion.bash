# SPDX-License-Identifier: Apache-2.0
# Completion of vramctl for bash: commands, options, names of sessions.
_vramctl() {
  local IFS=$'\n' word=${COMP_WORDS[COMP_CWORD]} words=() candidates i
  # bash makes --session=NAME three words.
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [ "${COMP_WORDS[i]}" = = ] || words+=("${COMP_WORDS[i]}")
  done
  [ "$word" = = ] && word=""
  candidates=$("${COMP_WORDS[0]}" __complete "${words[@]}" "$word" 2>/dev/null)
  if [ "$candidates" = :files ]; then
    compopt -o filenames
    COMPREPLY=($(compgen -f -- "$word"))
  else
    COMPREPLY=($candidates)
  fi
}
complete -F _vramctl vramctl
