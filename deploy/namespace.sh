#!/bin/sh
# What a namespace needs before the first run, once; again it changes nothing.
# Where the server is: TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and Temporal's other variables.
# On Temporal Cloud, namespaces are made elsewhere: RELAX_NAMESPACE_IS_THERE=1.
set -eu
namespace=${TEMPORAL_NAMESPACE:-default}

tries=0
until temporal operator cluster health >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "${TEMPORAL_ADDRESS:-localhost:7233} does not answer" >&2
        exit 1
    fi
    sleep 2
done

if [ -z "${RELAX_NAMESPACE_IS_THERE:-}" ] &&
    ! temporal operator namespace describe --namespace "$namespace" >/dev/null 2>&1; then
    temporal operator namespace create --namespace "$namespace" --retention 720h
fi

known=$(temporal operator search-attribute list --namespace "$namespace")
for attribute in RelaxRun=Keyword RelaxStep=Int RelaxRole=Keyword RelaxState=Keyword \
    RelaxWeightVersion=Int RelaxReward=Double; do
    name=${attribute%=*}
    case $known in
    *"$name"*) ;;
    *)
        temporal operator search-attribute create --namespace "$namespace" \
            --name "$name" --type "${attribute#*=}"
        ;;
    esac
done
echo "namespace $namespace has what runs need"
