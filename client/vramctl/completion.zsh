#compdef vramctl
# SPDX-License-Identifier: Apache-2.0
# Completion of vramctl for zsh: commands, options, names of sessions.
local -a candidates
candidates=("${(@f)$(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
if [[ "$candidates" == ":files" ]]; then
  compset -P '--*='
  _files
elif [[ -n "$candidates" ]]; then
  compadd -a candidates
else
  return 1
fi
