#!/usr/bin/env bash
# Trains on a Cloud TPU pod slice: create, install, run on all workers, follow, delete.
#
#   launch/tpu_pod.sh create                 requests the slice and waits until it is ready
#   launch/tpu_pod.sh run ARGUMENTS          copies the commit to all workers and starts training
#   launch/tpu_pod.sh logs                   follows the log of worker 0
#   launch/tpu_pod.sh resume ARGUMENTS       after maintenance: recreates the slice and resumes
#   launch/tpu_pod.sh stop                   sends SIGTERM: the run saves and ends
#   launch/tpu_pod.sh delete                 deletes the slice; files in --workdir remain
#   launch/tpu_pod.sh --dry-run COMMAND ...  prints the commands instead of running them
#
# Fill in, or set in the environment:
NAME=${NAME:-md4-jax}
PROJECT=${PROJECT:-}
ZONE=${ZONE:-us-central2-b}
ACCELERATOR=${ACCELERATOR:-v5litepod-64}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
# --spot is cheaper but may be preempted: then use `resume`.
CAPACITY=${CAPACITY:---spot}
# The arguments of `run` must contain a --workdir that all workers can access (a mounted bucket or disk).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
command=${1:-help}
[ $# -gt 0 ] && shift

do_it() {
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

fail() {
  echo "error: $1" >&2
  exit 2
}

tpu() {
  do_it gcloud compute tpus "$1" "$2" "${@:3}" --project "$PROJECT" --zone "$ZONE"
}

on_workers() { # on_workers WHICH SHELL-COMMAND
  tpu tpu-vm ssh "$NAME" --worker "$1" --command "$2"
}

create() {
  tpu queued-resources create "$NAME" --node-id "$NAME" \
    --accelerator-type "$ACCELERATOR" --runtime-version "$RUNTIME" "$CAPACITY"
  if [ -n "$dry" ]; then
    return
  fi
  while true; do
    state=$(gcloud compute tpus queued-resources describe "$NAME" --project "$PROJECT" \
      --zone "$ZONE" --format 'value(state.state)')
    echo "$(date +%T) $NAME is $state"
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDED) fail "the slice is $state: '$0 delete', then '$0 create'" ;;
    esac
    sleep 30
  done
}

check() { # before anything is deleted or requested
  case " $* " in
    *" --workdir"*) ;;
    *) fail "$command needs --workdir, a directory that all workers see" ;;
  esac
  changed=
  [ -n "$dry" ] || changed=$(git status --porcelain)
  [ -z "$changed" ] || fail "the workers get what is committed, and this is not:
$changed
Commit it, or put it aside with 'git stash --include-untracked'"
}

run() {
  archive=$(mktemp -u).tar.gz
  do_it git archive --format tar.gz --prefix md4_jax/ --output "$archive" HEAD
  tpu tpu-vm scp "$archive" "$NAME:md4_jax.tar.gz" --worker all
  words=$(printf '%q ' "$@")
  # A second run would take the place of the first in the file that `stop` reads.
  on_workers all "if kill -0 -- -\$(cat ~/md4_jax.pid 2>/dev/null) 2>/dev/null; then \
echo 'error: a run is under way: stop it first' >&2; exit 2; fi; \
tar xzf md4_jax.tar.gz && cd md4_jax && \
(setsid nohup bash launch/worker.sh $words >~/md4_jax.log 2>&1 & echo \$! >~/md4_jax.pid)"
  echo "started; '$0 logs' follows worker 0"
}

case $command in
  create | run | logs | resume | stop | delete)
    [ -n "$PROJECT" ] || fail "set PROJECT, the Google Cloud project: PROJECT=my-project $0 $command"
    ;;
esac
case $command in
  create) create ;;
  run)
    check "$@"
    run "$@"
    ;;
  logs) on_workers 0 "tail -n 100 -F ~/md4_jax.log" ;;
  resume)
    check "$@"
    tpu queued-resources delete "$NAME" --force --quiet || true
    create
    run "$@"
    ;;
  stop) on_workers all "kill -TERM -- -\$(cat ~/md4_jax.pid)" ;;
  delete) tpu queued-resources delete "$NAME" --force --quiet ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    [ "$command" = help ] || exit 2
    ;;
esac
