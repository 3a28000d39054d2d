#!/bin/sh
# Makes the secrets of deploy/compose.yaml in deploy/secrets, once; what is there stays.
# The folder is its user's alone. The files can be read by others, since containers that have other
# users get them one by one.
set -eu
folder=${1:-$(dirname "$0")/../secrets}
mkdir -p "$folder"
chmod 700 "$folder"

for name in gateway-token grafana-password postgres-password prometheus-token ray-token; do
    if [ ! -s "$folder/$name" ]; then
        openssl rand -hex 32 | tr -d '\n' >"$folder/$name"
    fi
done

# Prometheus may read the gateway's figures and use no role.
digest=$(sha256sum <"$folder/prometheus-token" | cut -d ' ' -f 1)
printf 'callers:\n  prometheus:\n    token_sha256: %s\n    roles: []\n' "$digest" \
    >"$folder/gateway-callers"
chmod 644 "$folder"/*
