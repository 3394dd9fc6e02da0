#!/bin/bash
# A command in namespaces of its own: an empty /tmp, a loopback and processes that no other run sees.
# So several runs of NeMo RL share a machine, a GPU each, without meeting each other's ports and files.
#
#   CUDA_VISIBLE_DEVICES=1 benchmarks/glue/apart.sh python -m recipes.grpo ...
#
# Needs root, and everything that the run reads or writes outside of /tmp.
exec unshare --mount --net --pid --fork --kill-child --mount-proc bash -c '
mount -t tmpfs tmpfs /tmp
python3 - <<PYTHON  # bring the loopback up: not every machine has `ip`
import fcntl, socket, struct
INTERFACE_UP, SET_FLAGS = 0x1 | 0x40, 0x8914
fcntl.ioctl(socket.socket(), SET_FLAGS, struct.pack("16sh", b"lo", INTERFACE_UP))
PYTHON
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1
exec "$@"' apart "$@"
