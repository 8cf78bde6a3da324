# SPDX-License-Identifier: Apache-2.0
#
# Unpacks packages of any release of Debian, from the mirror that this machine uses. Source this file after shell.sh.

# mirror_of_debian: prints the mirror that this machine uses.
mirror_of_debian() {
  local mirror
  mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Identifier: Packages' | awk '$1 == "Debian" { print $2; exit }')
  [ -n "$mirror" ] || fail "apt knows no mirror of Debian"
  echo "$mirror"
}

# unpack_from_debian SUITE FOLDER PACKAGE...: unpacks packages without their dependencies, and installs no package. The
# exit code is not 0 where apt cannot fetch the packages.
unpack_from_debian() {
  local suite=$1 folder=$2 mirror apt
  mirror=$(mirror_of_debian)
  mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" > "$folder/apt/sources.list"
  apt=(timeout 40 apt-get -qq -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=-
    -o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt" -o Dir::State::status=/dev/null
    -o APT::Sandbox::User= -o APT::Update::Error-Mode=any -o Acquire::Retries=0 -o Acquire::http::Timeout=10)
  (cd "$folder/apt" && "${apt[@]}" update && "${apt[@]}" download "${@:3}") || return 1
  for package in "$folder"/apt/*.deb; do dpkg -x "$package" "$folder" || return 1; done
  rm -r "$folder/apt"
}
