#compdef vramctl
# SPDX-License-Identifier: Apache-2.0
# Completion of vramctl for zsh: commands, options, names of sessions; after -- as what stands there completes by itself.
local -a candidates
local -i program=${words[(ie)--]}
if (( program < CURRENT )); then
  shift $program words
  (( CURRENT -= program ))
  _normal
  return
fi
candidates=("${(@f)$(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
if [[ "$candidates" == ":files" ]]; then
  compset -P '--*='
  _files
elif [[ -n "$candidates" ]]; then
  compadd -a candidates
else
  return 1
fi
