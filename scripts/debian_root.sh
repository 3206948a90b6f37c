#!/usr/bin/env bash
# Run make's targets as a newcomer would: in a fresh Debian with nothing but make, git and Python's venv module.
#
#   scripts/debian_root.sh                    make demo and make test in Debian 13
#   SUITE=bookworm scripts/debian_root.sh demo
#
# Needs root and mmdebstrap, and leaves nothing behind unless KEEP=1. BIND="/folder /file" lends the root more of this
# machine, read-only: a mirror of PyPI, or certificates, where pip can't do without.
set -euo pipefail

source=$(cd "$(dirname "$0")/.." && pwd)
suite=${SUITE:-trixie}
root=$(mktemp -d "${TMPDIR:-/tmp}/wan-tpu-$suite.XXXX")
targets=("${@:-demo}")
[ $# -gt 0 ] || targets=(demo test)

cleanup() {
  if [ -n "${KEEP:-}" ]; then echo "kept: $root"; else rm -rf --one-file-system "$root"; fi
}
trap cleanup EXIT

mmdebstrap --quiet --variant=apt --include=make,git,python3-venv,ca-certificates "$suite" "$root"
git clone --quiet "$source" "$root/srv/wan-tpu"
for file in /etc/resolv.conf /etc/hosts; do cp -L "$file" "$root$file"; done

# In a mount namespace of its own: whatever ends this, no mount stays.
export root
unshare --mount --propagation private bash -euo pipefail -s -- "${targets[@]}" <<'INSIDE'
for kernel in proc sys dev; do mount --rbind "/$kernel" "$root/$kernel"; done
mount -t tmpfs tmpfs "$root/dev/shm"
for lent in ${BIND:-}; do
  if [ -d "$lent" ]; then mkdir -p "$root$lent"; else mkdir -p "$root${lent%/*}" && touch "$root$lent"; fi
  mount --rbind --read-only "$lent" "$root$lent"
done
for target in "$@"; do
  start=$SECONDS
  env --ignore-environment HOME=/root PATH=/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 \
    chroot "$root" make --silent --directory /srv/wan-tpu "$target" < /dev/null
  echo "make $target: $((SECONDS - start)) s in $(. "$root/etc/os-release" && echo "$PRETTY_NAME"), $(chroot "$root" python3 --version)"
done
INSIDE
