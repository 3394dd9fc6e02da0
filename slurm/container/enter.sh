#!/bin/bash
# Enter a root folder with a command, for `cluster.enter` where no container runtime is:
# enter.sh ROOT MOUNTS FOLDER COMMAND..., MOUNTS as pyxis has them, /from:/to,/from:/to.
#
# As a runtime does it: what the command writes outside of the mounts is gone with it, the image's
# variables (/etc/environment) win over the job's, and a user is root inside, with the user's own rights.
# The folder belongs to who enters it, or root does.
set -euo pipefail

if [[ -z ${FP8_NEMO_UNSHARED-} ]]; then
    alone=(--mount --propagation=private)
    ((EUID)) && alone+=(--user --map-root-user)
    FP8_NEMO_UNSHARED=$EUID exec unshare "${alone[@]}" bash "$0" "$@"
fi
layers=/tmp/fp8-nemo-root-$FP8_NEMO_UNSHARED # mounted over in this process's view alone
unset FP8_NEMO_UNSHARED
image=$1 folder=$3
IFS=, read -ra mounts <<<"$2"
shift 3

mkdir -p "$layers"
mount -t tmpfs tmpfs "$layers"
mkdir "$layers"/{written,work,merged}
mount -t overlay -o "lowerdir=$image,upperdir=$layers/written,workdir=$layers/work" overlay "$layers/merged"
for mounted in /proc /sys /dev /tmp /etc/resolv.conf /etc/hosts "${mounts[@]}"; do
    from=${mounted%%:*} to=$layers/merged/${mounted#*:}
    if [[ -d $from ]]; then mkdir -p "$to"; elif ! [[ -e $to ]]; then mkdir -p "${to%/*}" && touch "$to"; fi
    mount --rbind "$from" "$to"
done
enter=$(command -v unshare)
while IFS= read -r variable; do export "${variable?}"; done <"$layers/merged/etc/environment"
export HOME=/root
exec "$enter" --root="$layers/merged" --wd="$folder" "$@"
