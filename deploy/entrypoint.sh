#!/bin/sh
# What a container of the image runs:
#
#   worker [OPTIONS]    a Ray node without GPUs, and on it a Temporal worker
#   ray-head [OPTIONS]  the head of a Ray cluster; OPTIONS are those of `ray start`
#   ray-node [OPTIONS]  one more node of it
#   healthy             0 if the worker of this container is alive
#   anything else       is run as it is
set -eu

# Mounted secrets are root's and a group may read them; those that we read must be their user's alone.
secrets=/tmp/relax-secrets
if [ -n "${RELAX_SECRETS_FROM:-}" ] && [ ! -d "$secrets" ]; then
    umask 077
    mkdir "$secrets"
    cp -L "$RELAX_SECRETS_FROM"/* "$secrets"/
    umask 022
fi

what=${1:-worker}
[ $# -eq 0 ] || shift

case $what in
worker)
    # A driver of Ray needs a node of the cluster beside it; router and gateways run on this one.
    ray start --address "${RAY_ADDRESS:?it names the head of the Ray cluster}" \
        --num-cpus 2 --num-gpus 0 --disable-usage-stats --include-log-monitor=false
    exec python -P -m workers.worker "$@"
    ;;
ray-head)
    exec ray start --head --block --port 6379 --dashboard-host 0.0.0.0 --disable-usage-stats "$@"
    ;;
ray-node)
    exec ray start --address "${RAY_ADDRESS:?it names the head of the Ray cluster}" --block \
        --disable-usage-stats "$@"
    ;;
healthy)
    exec python -c 'import sys, urllib.request as http; http.urlopen(sys.argv[1], timeout=5)' \
        "http://127.0.0.1:${RELAX_HEALTH_PORT:?}/healthz"
    ;;
*)
    exec "$what" "$@"
    ;;
esac
