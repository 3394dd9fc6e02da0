#!/bin/bash
# Build a root folder laid out as NeMo RL's image: `build.sh ROOT NEMO_RL`, as root, with mmdebstrap.
#
# From Debian's packages and a Python registry alone, so that the container way can be tried where
# neither the image nor a GPU nor a container runtime is. NEMO_RL is a clone with Megatron-Bridge and
# Megatron-LM in it. Paths, variables and environments are those of NeMo RL's docker/Dockerfile; what
# it compiles from git (FlashAttention, Mamba, DeepGEMM, DeepEP) is not there, and TransformerEngine
# alone is compiled. 18 GB; 41 minutes on two cores that others used too. Called again, it goes on.
#
# DEBIAN_MIRROR and what pip and uv read (PIP_*, UV_*) choose other registries.
set -euo pipefail
root=$(realpath -m "$1") clone=$(realpath "$2") here=$(realpath "$(dirname "$0")")
driver=/opt/nemo_rl_venv
workers=/opt/ray_venvs
vllm=$workers/nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker
policy=$workers/nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker
bridge=/opt/nemo-rl/3rdparty/Megatron-Bridge-workspace/Megatron-Bridge
certificates=/etc/ssl/certs/ca-certificates.crt

[[ -d $clone${bridge#/opt/nemo-rl}/3rdparty/Megatron-LM/megatron ]] || {
    echo "$clone: has no Megatron-LM; git submodule update --init --recursive" >&2
    exit 2
}

inside() { # run a command in the root, with this machine's name server and certificates
    unshare --mount --propagation=private bash -euc '
        root=$1 && shift
        for shared in /proc /sys /dev /etc/resolv.conf '$certificates'; do
            mount --rbind "$shared" "$root$shared"
        done
        exec chroot "$root" env HOME=/root PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
            SSL_CERT_FILE='$certificates' PIP_CERT='$certificates' UV_LINK_MODE=hardlink "$@"
    ' inside "$root" "$@"
}
held=(--overrides /opt/requirements/overrides.txt --constraints /opt/requirements/constraints.txt)
install() { # packages into an environment, in the versions of NeMo RL's uv.lock
    inside uv pip install --quiet --python "$1/bin/python" "${held[@]}" "${@:2}"
}
environment() { # make one, of a file of requirements; paths of the clone that it imports come after
    local folder=$1 list=$2
    [[ -e $root$folder/.made ]] && return
    inside uv venv --quiet --allow-existing --python /usr/bin/python3 "$folder"
    install "$folder" -r "/opt/requirements/$list.txt"
    printf '%s\n' "${@:3}" >"$root$folder/lib/$python/site-packages/nemo_rl.pth"
    touch "$root$folder/.made"
}

if ! [[ -L $root/usr/local/bin/uv ]]; then # a link to a path of the root
    rm -rf --one-file-system "$root"
    apt-config dump Acquire | grep -E '^Acquire::(Check|Retries|http)' >"$root.apt" || true
    # In a view of its own: what a killed mmdebstrap has mounted must not stay, for the next `rm` to find.
    unshare --mount --propagation=private mmdebstrap --quiet --variant=minbase \
        --aptopt="$root.apt" \
        --include=ca-certificates,g++,git,iproute2,procps,python3-dev,python3-venv \
        trixie "$root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
    rm "$root.apt"
    touch "$root/etc/resolv.conf"
    inside python3 -m venv /opt/uv
    inside /opt/uv/bin/pip install --quiet --disable-pip-version-check uv
    ln -s /opt/uv/bin/uv "$root/usr/local/bin/uv"
fi
python=$(basename "$(realpath "$root/usr/bin/python3")")

[[ -d $root/opt/nemo-rl/nemo_rl ]] || cp -a "$clone" "$root/opt/nemo-rl"
mkdir -p "$root/opt/requirements"
cp "$here/requirements.py" "$root/opt/requirements/"
inside python3 /opt/requirements/requirements.py /opt/nemo-rl /opt/requirements
environment $driver driver /opt/nemo-rl
environment $vllm vllm /opt/nemo-rl
environment $policy policy /opt/nemo-rl $bridge/src $bridge/3rdparty/Megatron-LM

if ! [[ -e $root$policy/.compiled ]]; then # against the headers that torch's own CUDA packages bring
    packages=$policy/lib/$python/site-packages/nvidia
    cuda=13.0 # of the torch that NeMo RL pins
    inside uv pip install --quiet --python $policy/bin/python "${held[@]:0:2}" \
        nvidia-cuda-{nvcc,crt,cccl}==$cuda.\* nvidia-nvvm==$cuda.\*
    # Unoptimized, in half the time: without a GPU it is imported, and never run.
    printf '#!/bin/sh\nexec g++ "$@" -O0\n' >"$root/usr/local/bin/quick-g++"
    chmod +x "$root/usr/local/bin/quick-g++"
    inside env CUDA_HOME="$packages/cu13" NVTE_FRAMEWORK=pytorch MAX_JOBS="$(nproc)" CXX=quick-g++ \
        CPLUS_INCLUDE_PATH="$packages/cudnn/include:$packages/nccl/include" \
        uv pip install --quiet --python $policy/bin/python --no-build-isolation "${held[@]}" \
        'transformer-engine[pytorch,core_cu13]==2.15.0'
    touch "$root$policy/.compiled"
fi

inside git config --system --add safe.directory '*'
cat >"$root/etc/environment" <<END
NRL_CONTAINER=1
NEMO_RL_COMMIT=$(git -C "$clone" rev-parse HEAD)
NEMO_RL_VENV_DIR=$workers
RAY_USAGE_STATS_ENABLED=0
RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
TORCH_CUDA_ARCH_LIST=9.0 10.0
UV_LINK_MODE=copy
UV_PROJECT_ENVIRONMENT=$driver
PATH=$driver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
END
inside $driver/bin/python /opt/nemo-rl/tools/generate_fingerprint.py \
    >"$root/opt/nemo_rl_container_fingerprint"
echo "$root: $(du -sh --exclude=proc "$root" | cut -f1)"
