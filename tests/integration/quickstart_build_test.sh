#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What quickstart.sh says while it builds, and how it ends. A stand-in for cmake builds; all else is this build's.
# Usage: quickstart_build_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1 build_dir=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; cat "$work/out" >&2; exit 1; }

mkdir -p "$work/tree/deploy" "$work/tree/build/release" "$work/bin"
cp "$source_dir/deploy/quickstart.sh" "$work/tree/deploy/"
printf '#!/bin/sh\n' > "$work/tree/deploy/packages.sh"
for folder in server client deploy; do ln -s "$build_dir/$folder" "$work/tree/build/release/"; done
cat > "$work/bin/cmake" <<'END'
#!/bin/sh
case "$*" in
  "--preset release") echo "configured"; exit "$CONFIGURE_CODE" ;;
  *" -n") if [ "$STEPS" = 0 ]; then echo "ninja: no work to do."; else seq -f "[%g/$STEPS] step" "$STEPS"; fi ;;
  *) echo "[1/$STEPS] step"
     until grep -q "of $STEPS steps done" "$OUT" || ! kill -0 $PPID; do sleep 0.1; done
     echo "said by the build"; exit "$BUILD_CODE" ;;
esac
END
chmod +x "$work/bin/cmake" "$work/tree/deploy/packages.sh"
# run STEPS CONFIGURE_CODE BUILD_CODE: the exit code, with the output in $work/out.
run() {
  local code=0
  STEPS=$1 CONFIGURE_CODE=$2 BUILD_CODE=$3 OUT=$work/out PATH=$work/bin:$PATH \
    "$work/tree/deploy/quickstart.sh" --seconds 1 > "$work/out" 2>&1 || code=$?
  echo $code
}
says() { grep -q "$1" "$work/out" || fail "it does not say: $1"; }

[ "$(run 50 0 0)" = 0 ] || fail "a build that works"
says '50 steps on [0-9]* processors' && says 'about [0-9]* minutes the first time' && says '[01] of 50 steps done after [0-9]*:'
says 'built in [0-9]*:' && says 'All checks passed.'
[ "$(run 0 0 0)" = 0 ] || fail "with nothing to build"
says 'everything is built' && says 'All checks passed.'
# Two at once: one of them finds the port of the metrics taken.
"$work/tree/deploy/quickstart.sh" --build-dir "$build_dir" --seconds 1 > "$work/other" 2>&1 & other=$!
"$work/tree/deploy/quickstart.sh" --build-dir "$build_dir" --seconds 1 > "$work/out" 2>&1 || fail "one of two at once"
wait $other || fail "the other of two at once: $(cat "$work/other")"
[ "$(run 50 1 0)" = 1 ] || fail "cmake failed, and it went on"
says 'configured' && says 'FAILED: cmake'
[ "$(run 50 0 1)" = 1 ] || fail "the build failed, and it went on"
says 'said by the build' && says 'FAILED: the build'
