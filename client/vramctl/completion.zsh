#compdef vramctl
# SPDX-License-Identifier: Apache-2.0
# Completion of vramctl for zsh: commands, options, names of sessions.
local -a candidates
candidates=("${(@f)$(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
if [[ "$candidates" == ":files" ]]; then
  _files
else
  compadd -a candidates
fi
