# SPDX-License-Identifier: Apache-2.0
# Completion of vramctl for bash: commands, options, names of sessions; after -- as what stands there completes by itself.
_vramctl() {
  local IFS=$'\n' cur=${COMP_WORDS[COMP_CWORD]} words=("${COMP_WORDS[@]}") cword=$COMP_CWORD before=() candidates i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [ "${COMP_WORDS[i]}" = -- ] || continue
    if declare -F _command_offset > /dev/null; then
      _command_offset $((i + 1))
    else
      compopt -o filenames 2>/dev/null
      if ((COMP_CWORD == i + 1)); then COMPREPLY=($(compgen -c -- "$cur")); else COMPREPLY=($(compgen -f -- "$cur")); fi
    fi
    return
  done
  # bash takes a name with : apart, which bash-completion undoes, and makes --session=NAME three words.
  if declare -F _get_comp_words_by_ref > /dev/null; then _get_comp_words_by_ref -n : cur words cword; fi
  for ((i = 1; i < cword; ++i)); do
    [ "${words[i]}" = = ] || before+=("${words[i]}")
  done
  [ "$cur" = = ] && cur=""
  candidates=$("${words[0]}" __complete "${before[@]}" "$cur" 2>/dev/null)
  if [ "$candidates" = :files ]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$cur"))
  else
    COMPREPLY=($candidates)
    if declare -F __ltrim_colon_completions > /dev/null; then __ltrim_colon_completions "$cur"; fi
  fi
}
complete -F _vramctl vramctl
