# SPDX-License-Identifier: Apache-2.0
#
# Common code for scripts that new_debian.sh runs. Root of the new Debian sources this file.
set -euo pipefail
cd /test
. ./shell.sh

# Runs vrambrokerd like its unit: its own user, two capabilities.
as_the_unit=(setpriv --reuid=vrambroker --regid=vrambroker --init-groups --no-new-privs
             --bounding-set=-all,+sys_ptrace,+checkpoint_restore --inh-caps=-all,+sys_ptrace,+checkpoint_restore
             --ambient-caps=-all,+sys_ptrace,+checkpoint_restore)

# Makes a sudo for the guides' commands. The new Debian has none.
put_sudo() {
  cat > /usr/local/bin/sudo << 'END' && chmod +x /usr/local/bin/sudo
#!/bin/sh
if [ "$1" = -u ]; then user=$2 && shift 2 && set -- setpriv --reuid="$user" --regid="$user" --init-groups "$@"; fi
exec "$@"
END
}
