#!/bin/sh
# Becomes one vLLM worker of syshax: worker INSTANCE [options], called by syshax-worker@INSTANCE.service.
# The instance's file in @SYSCONFDIR@/syshax/workers says with what:
#   WORKER_MODEL     checkpoint directory or repository
#   WORKER_PYTHON    a Python that has vLLM and syshax's client, or
#   WORKER_IMAGE     a container image that has both, run by WORKER_ENGINE (podman) with WORKER_ENGINE_OPTIONS
set -eu
instance=$1
shift
fail() {
    echo "syshax-worker@$instance: $1" >&2
    echo "hint: $2" >&2
    exit 2
}
file=@SYSCONFDIR@/syshax/workers/$instance.env
[ -n "${WORKER_MODEL:-}" ] || fail "$file sets no WORKER_MODEL" "name the checkpoint's directory there"
if [ -n "${WORKER_IMAGE:-}" ]; then
    [ -z "${WORKER_PYTHON:-}" ] || fail "$file sets both WORKER_PYTHON and WORKER_IMAGE" "leave one of them"
    engine=${WORKER_ENGINE:-podman}
    command -v "$engine" >/dev/null || fail "there is no $engine" "install it, or set WORKER_ENGINE in $file"
    # Attaching needs the daemon's sockets and the group that may use them, nothing else of the host.
    # shellcheck disable=SC2086
    exec "$engine" run --rm --name "syshax-worker-$instance" --network host \
        --group-add "$(getent group syshax | cut -d: -f3)" \
        --volume /run/syshax:/run/syshax --volume "$WORKER_MODEL:$WORKER_MODEL:ro" \
        ${WORKER_ENGINE_OPTIONS:-} "$WORKER_IMAGE" syshax-worker "$WORKER_MODEL" "$@"
fi
[ -n "${WORKER_PYTHON:-}" ] ||
    fail "$file sets neither WORKER_PYTHON nor WORKER_IMAGE" "name a Python that has vLLM, or a container image"
command -v "$WORKER_PYTHON" >/dev/null || fail "WORKER_PYTHON=$WORKER_PYTHON is no program" "give its full path in $file"
exec "$WORKER_PYTHON" -m syshax.vllm.launcher "$WORKER_MODEL" "$@"
