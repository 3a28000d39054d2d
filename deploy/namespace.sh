#!/bin/sh
# What a namespace needs before the first run, once; again it changes nothing.
# Where the server is: TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and Temporal's other variables.
# On Temporal Cloud, namespaces are made elsewhere: RELAX_NAMESPACE_IS_THERE=1.
set -eu
namespace=${TEMPORAL_NAMESPACE:-default}

# A server that has just started, or a namespace that was just made, is not known everywhere at once.
patiently() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ "$tries" -lt 60 ] || return 1
        sleep 1
    done
}

patiently temporal operator cluster health >&2

if [ -z "${RELAX_NAMESPACE_IS_THERE:-}" ] &&
    ! temporal operator namespace describe --namespace "$namespace" >/dev/null 2>&1; then
    temporal operator namespace create --namespace "$namespace" --retention 720h
fi

known=$(patiently temporal operator search-attribute list --namespace "$namespace")
for attribute in RelaxRun=Keyword RelaxStep=Int RelaxRole=Keyword RelaxState=Keyword \
    RelaxWeightVersion=Int RelaxReward=Double; do
    name=${attribute%=*}
    case $known in
    *"$name"*) ;;
    *)
        patiently temporal operator search-attribute create --namespace "$namespace" \
            --name "$name" --type "${attribute#*=}"
        ;;
    esac
done
echo "namespace $namespace has what runs need"
