#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# debian_test.sh runs this script through new_debian.sh, as root of the new Debian, beside the packages.
. /test/machine.sh
explain() { tail -n 50 /tmp/*.log; }
# as USER COMMAND...: runs COMMAND without any privilege, like a login.
as() { setpriv --reuid="$1" --regid="$1" --init-groups --inh-caps=-all --bounding-set=-all --reset-env "${@:2}"; }
# Lists all files, except the files of the package manager and of the test itself.
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /test -o -path /tmp -o -path /var -o -path /home -o -path /run/systemd -o -path '/etc/*-' \) -prune -o -print | sort; }

# Starts the loopback device, which is down at first: SIOCSIFFLAGS with IFF_UP.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
files > /tmp/before
say "Installed"
dpkg -i ./*.deb > /tmp/dpkg.log 2>&1 || fail "dpkg -i"
id vrambroker
[ "$(stat -c '%U %G %a' /run/vrambroker)" = "vrambroker vrambroker 755" ] || fail "/run/vrambroker is not the daemon's"
[ "$(systemctl is-enabled vrambroker)" = enabled ] || fail "the service is not enabled"
packages=(vrambroker libvrambroker1 libvrambroker-dev python3-vrambroker vrambroker-slurm)
for package in "${packages[@]}"; do
  [ -s /usr/share/doc/$package/copyright ] || fail "$package has no copyright file"
  newest=$(zcat /usr/share/doc/$package/changelog.gz | head -n 1)
  [[ $newest == "vrambroker ($(dpkg-query -W -f '${Version}' $package)) "* ]] || fail "$package: the changelog begins with '$newest'"
  case $(dpkg-query -W -f '${binary:Synopsis}' $package) in
    *CMake*) fail "$package has no description" ;;
  esac
done
[ "$(dpkg-query -W -f '${binary:Synopsis}\n' "${packages[@]}" | sort -u | wc -l)" = ${#packages[@]} ] \
  || fail "two packages have the same synopsis"
grep -q '^libvrambroker 1 libvrambroker1 ' /var/lib/dpkg/info/libvrambroker1*.shlibs || fail "libvrambroker1 has no shlibs file"

say "Man pages and completion"
for page in vramctl.1 vrambroker.textproto.5 vrambrokerd.8; do man ${page%.*} > /tmp/${page%.*}.man || fail "no man page $page"; done
grep -q 'Command hold' /tmp/vramctl.man || fail "vramctl(1) does not explain its commands"
grep -q '^ *socket_dir: ' /tmp/vrambroker.textproto.man || fail "vrambroker.textproto(5) has no fields"
[ -s /usr/share/bash-completion/completions/vramctl ] && [ -s /usr/share/zsh/vendor-completions/_vramctl ] || fail "no completion"

say "The plugin is where Slurm looks"
[ -s /usr/lib/$(uname -m)-linux-gnu/slurm-wlm/spank_vrambroker.so ] && [ -s /etc/slurm/plugstack.conf.d/vrambroker.conf ] || fail "no plugin for Slurm"

say "The unit"
systemd-analyze verify vrambroker.service
systemd-analyze security --offline=yes --threshold=30 --no-pager vrambroker.service | tail -n 1

say "The daemon, as the unit runs it: its own user, two capabilities"
exec_start=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/vrambroker.service | tr -d '"')
sed -i 's/^device: .*/device: "host"/; s/^# capacity: .*/capacity: "256MiB"/; s/^http_address: .*/http_address: "off"/' /etc/vrambroker/vrambroker.textproto
install -d -m 0700 -o vrambroker -g vrambroker /var/lib/vrambroker  # StateDirectory=
"${as_the_unit[@]}" $exec_start --check_config
"${as_the_unit[@]}" $exec_start 2> /tmp/daemon.log &
daemon_pid=$!
until_true grep -q 'daemon ready' /tmp/daemon.log
[ "$(stat -c %U /proc/$daemon_pid)" = vrambroker ] || fail "the daemon is of another user"
[ "$(sed -n 's/^CapEff:[[:space:]]*0*//p' /proc/$daemon_pid/status)" = 10000080000 ] || fail "the daemon has other capabilities than CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE"

say "Its clients: users of the group, and nobody else"
useradd --create-home --groups vrambroker alice
useradd --create-home bob
as alice vramctl status > /tmp/status || { cat /tmp/status; fail "vramctl status"; }
as alice vramctl hold 64MiB --limit=0.5 > /tmp/hold.log 2>&1 &
held() { as alice vramctl status --format=json | tr -d ' \n' | grep -q "\"reserved_bytes\":\"\?$1\"\?[,}]"; }
until_true held $((64 << 20))
as alice vramctl sessions
if as bob vramctl status > /tmp/bob.log 2>&1; then fail "bob is not of the group, and was served"; fi
cat /tmp/bob.log

say "What a killed client held comes back: the daemon sees that nobody maps it any more"
kill -KILL "$(cd /proc && grep -lx vramctl [0-9]*/comm | cut -d/ -f1)"
until_true held 0
# Some virtual machines let not even root look into their first process.
unreadable=$(for process in /proc/[0-9]*; do cat "$process/maps" > /dev/null 2>&1 || [ ! -d "$process" ] || echo "$process"; done | wc -l)
said=$(sed -n 's/.* \([0-9]*\) process\(es\)\? cannot be inspected.*/\1/p' /tmp/daemon.log)
[ "${said:-0}" -le "$unreadable" ] || fail "the daemon may look into fewer processes than root"

say "Python"
as alice python3 -c 'import vrambroker
from importlib.metadata import version
assert vrambroker.__version__ == version("vrambroker")
with vrambroker.Client(limit=0.25) as client:
    buffer = client.malloc(1 << 20)
    buffer.write(b"1 MiB, in Python")
    print(buffer.read(16).decode())'

say "Programs, by find_package and by pkg-config"
cp -r consumer /home/alice/ && chown -R alice: /home/alice/consumer
as alice sh -e -c 'cd ~/consumer
  cmake -S . -B build > log 2>&1 || { cat log; exit 1; }
  cmake --build build > log || { cat log; exit 1; }
  cc consumer.c $(pkg-config --cflags --libs vrambroker) -o c
  c++ -std=c++17 consumer.cc $(pkg-config --cflags --libs vrambroker-client) -o cc
  build/consumer_c
  ./c
  build/consumer_cc
  ./cc'

say "The README and the guides, command by command"
put_sudo
chown -R alice: tree
as alice mkdir -p tree/build/release/server tree/build/release/client
ln -s /usr/bin/vrambrokerd tree/build/release/server/
ln -s /usr/bin/vramctl tree/build/release/client/
python3 guides_test.py tree README.md   # the guide's daemon has the port of the page
kill -TERM $daemon_pid
wait $daemon_pid || fail "the daemon did not stop well"
sed -i 's/^http_address: .*/http_address: "localhost:9477"/' /etc/vrambroker/vrambroker.textproto
"${as_the_unit[@]}" $exec_start 2> /tmp/daemon.log &
daemon_pid=$!
until_true grep -q 'daemon ready' /tmp/daemon.log
python3 guides_test.py tree deploy/OPERATING.md deploy/MONITORING.md client/GUIDE.md client/python/README.md server/TUNING.md
rm /usr/local/bin/sudo

say "Stopped and purged: nothing is left"
kill -TERM $daemon_pid
wait $daemon_pid || fail "the daemon did not stop well"
userdel --remove alice 2> /dev/null
userdel --remove bob 2> /dev/null
dpkg --purge vrambroker-slurm python3-vrambroker libvrambroker-dev libvrambroker1 vrambroker > /tmp/dpkg.log 2>&1 || fail "dpkg --purge"
if getent passwd vrambroker || getent group vrambroker; then fail "the user was left"; fi
files > /tmp/after
diff /tmp/before /tmp/after || fail "these files were left, or are missing"
if grep -rl vrambroker /etc /var/lib/systemd 2> /dev/null | grep -v -e '-$'; then fail "these files still name it"; fi
say "All of it works"
