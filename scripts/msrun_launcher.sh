#!/bin/bash
# Starts a training on one or more devices with msrun, or with plain python for one worker. Usage: msrun_launcher.sh --help
#
# Takes the arguments of the script of the same name in MindSpore Transformers. Differences:
#   - The exit status is the job's, also with JOIN False: the script waits without output. MSRUN_DETACH=1 restores the early
#     return. msrun reports every failure as 1 (and Ctrl-C as 0), so the script takes the status of the failed worker from
#     msrun's message on standard error. If that cannot be read (GLOG_v=4 hides it), the status is msrun's.
#   - With JOIN False what msrun prints of each worker is short.
#   - WORKER_NUM 1 works.
#   - After a worker has failed, msrun waits for its scheduler, which can wait CLUSTER_TIME_OUT for workers that msrun has
#     just killed. Here the scheduler gets MSRUN_GRACE seconds.
#   - SIGTERM and SIGINT end every process of the job; msrun alone leaves its workers running on SIGTERM. After SIGTERM the
#     workers have MSRUN_LEAVE seconds to save and exit, and their scheduler stays that long.
#   - A process that writes a checkpoint in the background (async_save: process) does not end with its training: it has
#     MSRUN_LEAVE seconds to finish its save.
#   - A process that does not end even after SIGKILL (state D: it waits in the kernel for a device or a disk) is named and left
#     behind after MSRUN_STUCK seconds.
#   - CMD is split into words as a shell splits quoted words, but nothing in it is expanded or run as a shell command.

{  # bash reads a block whole before it runs it, so an update of this file changes no job that runs
usage() {
  cat <<'TEXT'
usage: bash scripts/msrun_launcher.sh "CMD"
       bash scripts/msrun_launcher.sh "CMD" WORKER_NUM
       bash scripts/msrun_launcher.sh "CMD" WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT
       bash scripts/msrun_launcher.sh "CMD" WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN CLUSTER_TIME_OUT

CMD               script and arguments in one pair of quotes; line breaks after a backslash and inner quotes are allowed
WORKER_NUM        workers of the whole job (8); 1 runs CMD with python alone, without msrun
LOCAL_WORKER      workers on this host (8); fewer than WORKER_NUM: start this script on each host with its own NODE_RANK
MASTER_ADDR       address of the host that runs the scheduler (127.0.0.1)
MASTER_PORT       port of the scheduler (8118)
NODE_RANK         number of this host, from 0 (0)
LOG_DIR           folder of worker_R.log and scheduler.log (output/msrun_log)
JOIN              True: wait and show the logs of the workers here; False: wait without showing them (False)
CLUSTER_TIME_OUT  seconds to wait until all workers have joined (7200)

environment:
  MSRUN_DETACH=1               with JOIN False: return as soon as the workers are started; the exit status then says
                               nothing about the job
  MSRUN_GRACE=S                seconds between SIGTERM and SIGKILL when the job is ended, and how long the scheduler
                               may run after a worker has failed (10)
  MSRUN_LEAVE=S                seconds that the workers have after SIGTERM to save and exit (default: MSRUN_GRACE if set,
                               else 60)
  MSRUN_RESTARTS=N             start the job again when a rank has died or hangs, up to N times in a row without progress
                               (mindresume run --max-restarts N, see docs/supervisor.md); the logs of the last starts are
                               kept in LOG_DIR/earlier
  MSRUN_RENDEZVOUS=DIR         with MSRUN_RESTARTS on several hosts: the folder through which their supervisors start and end
                               together, the same on every host, on a disk that all hosts see, of this job alone
  MSRUN_NOTIFY_URL=URL         with MSRUN_RESTARTS: post failures, restarts and the end to this webhook, for example of a chat bot;
                               MSRUN_NOTIFY_FORMAT=json|feishu|dingtalk|wecom|slack (json), MSRUN_NOTIFY_EVENTS=A,B, see
                               docs/notifications.md
  MSRUN_STANDBY=1              with MSRUN_RESTARTS: fork the ranks of later starts from a process that has imported everything
                               (mindresume run --standby)
  MSRUN_METRICS_PORT=P         with MSRUN_RESTARTS: answer Prometheus on this port (mindresume run --metrics-port P)
  MSRUN_STUCK=S                seconds that a process may take to end after SIGKILL before it is named and left behind (60)
  MF_LOG_SUFFIX=TEXT           appended to the names of the log folders
  PLOG_REDIRECT_TO_OUTPUT=True put the logs of the device under output/plog
  LOG_MF_PATH=DIR              logs of mindformers (output/log)
  PYTHON=PATH                  python to use; its folder is put first in PATH, so that msrun and the workers use it too

exit status: the job's (the first failed worker's; 128 + N if signal N ended it), 130 after SIGINT, 143 after SIGTERM, 2 for a
wrong argument. Closing the terminal does not end the job.

examples:
  bash scripts/msrun_launcher.sh "run_mindformer.py --config configs/qwen3.yaml --run_mode train" 8
  bash scripts/msrun_launcher.sh "run_mindformer.py --config configs/qwen3.yaml --run_mode train \
    --load_checkpoint ./output/checkpoint --resume_training True" 8 8118 output/msrun_log True 7200
TEXT
}

refuse() {
  echo "msrun_launcher.sh: error: $*" >&2
  exit 2
}

# ---------------------------------------------------------------------------------------------------- arguments
for word in "$@"; do
  if [[ $word == -h || $word == --help ]]; then
    usage
    exit 0
  fi
done

WORKER_NUM=8
LOCAL_WORKER=8
MASTER_ADDR=127.0.0.1
MASTER_PORT=8118
NODE_RANK=0
LOG_DIR=output/msrun_log
JOIN=False
CLUSTER_TIME_OUT=7200
case $# in
  1) echo "msrun_launcher.sh: no number of workers given, starting 8" ;;
  2) WORKER_NUM=$2 LOCAL_WORKER=$2 ;;
  6) WORKER_NUM=$2 LOCAL_WORKER=$2 MASTER_PORT=$3 LOG_DIR=$4 JOIN=$5 CLUSTER_TIME_OUT=$6 ;;
  9) WORKER_NUM=$2 LOCAL_WORKER=$3 MASTER_ADDR=$4 MASTER_PORT=$5 NODE_RANK=$6 LOG_DIR=$7 JOIN=$8 CLUSTER_TIME_OUT=$9 ;;
  *) usage >&2
     refuse "expected 1, 2, 6 or 9 arguments, got $# (is CMD in quotes?)" ;;
esac

[[ $WORKER_NUM =~ ^[1-9][0-9]*$ ]] || refuse "WORKER_NUM must be a number from 1 on, got '$WORKER_NUM'"
[[ $LOCAL_WORKER =~ ^[1-9][0-9]*$ ]] || refuse "LOCAL_WORKER must be a number from 1 on, got '$LOCAL_WORKER'"
(( LOCAL_WORKER <= WORKER_NUM )) || refuse "LOCAL_WORKER is $LOCAL_WORKER, more than WORKER_NUM, $WORKER_NUM"
[[ $MASTER_PORT =~ ^[0-9]+$ ]] || refuse "MASTER_PORT must be a number, got '$MASTER_PORT'"
[[ $NODE_RANK =~ ^[0-9]+$ ]] || refuse "NODE_RANK must be a number from 0 on, got '$NODE_RANK'"
[[ $CLUSTER_TIME_OUT =~ ^-?[0-9]+$ ]] || refuse "CLUSTER_TIME_OUT must be a number of seconds, got '$CLUSTER_TIME_OUT'"
[[ -n $LOG_DIR ]] || refuse "LOG_DIR is empty"
case ${JOIN,,} in
  true) JOIN=True ;;
  false) JOIN=False ;;
  *) refuse "JOIN must be True or False, got '$JOIN'" ;;
esac
MSRUN_LEAVE=${MSRUN_LEAVE:-${MSRUN_GRACE:-60}}
[[ $MSRUN_LEAVE =~ ^[0-9]+$ ]] || refuse "MSRUN_LEAVE must be a number of seconds, got '$MSRUN_LEAVE'"
MSRUN_GRACE=${MSRUN_GRACE:-10}
[[ $MSRUN_GRACE =~ ^[0-9]+$ ]] || refuse "MSRUN_GRACE must be a number of seconds, got '$MSRUN_GRACE'"
MSRUN_STUCK=${MSRUN_STUCK:-60}
[[ $MSRUN_STUCK =~ ^[0-9]+$ ]] || refuse "MSRUN_STUCK must be a number of seconds, got '$MSRUN_STUCK'"

# ---------------------------------------------------------------------------------------------------- environment
if [[ -n ${PYTHON:-} ]]; then
  found=$(command -v -- "$PYTHON") || refuse "PYTHON=$PYTHON cannot be run"
  PYTHON=$(cd -- "$(dirname -- "$found")" && pwd)/$(basename -- "$found")
  export PATH=${PYTHON%/*}:$PATH
else
  PYTHON=$(command -v python || command -v python3) || refuse "no python on PATH; set PYTHON"
fi
[[ -z ${MINDRESUME_STANDBY_BIN:-} ]] || export PATH=$MINDRESUME_STANDBY_BIN:$PATH      # mindresume run --standby

if [[ -n ${MSRUN_RESTARTS:-} ]]; then
  [[ $MSRUN_RESTARTS =~ ^[0-9]+$ ]] || refuse "MSRUN_RESTARTS must be a number, got '$MSRUN_RESTARTS'"
  supervisor=(run --max-restarts "$MSRUN_RESTARTS")
  if (( LOCAL_WORKER < WORKER_NUM )); then
    [[ -n ${MSRUN_RENDEZVOUS:-} ]] || refuse "MSRUN_RESTARTS on several hosts: MSRUN_RENDEZVOUS is not set. Set it to the same" \
      "folder on every host: on a disk that all hosts see, of this job alone, for example MSRUN_RENDEZVOUS=/shared/JOB/supervisor"
    (( WORKER_NUM % LOCAL_WORKER == 0 )) || refuse "MSRUN_RESTARTS needs as many workers on each host: $WORKER_NUM is no multiple" \
      "of $LOCAL_WORKER. Start mindresume run --nodes N --node-rank K --rendezvous DIR -- bash $0 ... on each host instead"
    supervisor+=(--nodes $((WORKER_NUM / LOCAL_WORKER)) --node-rank "$NODE_RANK" --rendezvous "$MSRUN_RENDEZVOUS")
  fi
  [[ ${MSRUN_STANDBY:-0} != 1 ]] || supervisor+=(--standby)
  unset MSRUN_RESTARTS             # the command below is this script without it
  here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
  export PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH}
  exec "$PYTHON" -m mindresume "${supervisor[@]}" -- bash "$here/${BASH_SOURCE[0]##*/}" "$@"
fi

# Words of CMD, each ended by a zero byte. A backslash at the end of a line continues it, with or without blanks after it.
split_words='
import re, shlex, sys
for word in shlex.split(re.sub(r"\\[ \t]*\r?\n", " ", sys.argv[1])):
    sys.stdout.write(word + "\0")
'
mapfile -d '' -t COMMAND < <("$PYTHON" -ISc "$split_words" "$1" 2>/dev/null)
(( ${#COMMAND[@]} )) || refuse "CMD is empty or its quotes are not closed: $1"
case ${COMMAND[0]} in
  *.py) [[ -f ${COMMAND[0]} ]] || refuse "${COMMAND[0]}: no such file in $PWD" ;;
esac

PROJECT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$PROJECT${PYTHONPATH:+:$PYTHONPATH}
SUFFIX=${MF_LOG_SUFFIX:+_$MF_LOG_SUFFIX}
LOG_DIR=$LOG_DIR$SUFFIX
export LOG_MF_PATH=${LOG_MF_PATH:-$PWD/output/log$SUFFIX}
case ${PLOG_REDIRECT_TO_OUTPUT:-False} in
  [Ff]alse | 0) ;;
  *) export ASCEND_PROCESS_LOG_PATH=$PWD/output/plog$SUFFIX
     echo "msrun_launcher.sh: device logs are in $ASCEND_PROCESS_LOG_PATH" ;;
esac
ulimit -u unlimited 2>/dev/null      # many processes per host; without permission to raise the limit it stays unchanged
mkdir -p -- "$LOG_DIR" || refuse "LOG_DIR $LOG_DIR cannot be created"

# ---------------------------------------------------------------------------------------------------- processes
FAILED_WORKER='exit with exception\. Error code: (-?[0-9]+)\.'      # in msrun's message

# Every process of the job has this variable, also after its parent is gone: msrun gives each worker a session of its own.
MARK=MSRUN_LAUNCHER_JOB=$$.$RANDOM$RANDOM
# Processes that write checkpoints in the background have this one instead (mindresume/saving).
WRITER_MARK=${MARK/JOB/WRITER}

SUPERVISOR='' WATCHER='' DEADLINE=0 AT_ONCE=0 STUCK=' '

# Sleeps without a child process, so that none is left running: nothing ever arrives on this pipe.
pause() {
  read -rt "$1" -u "$NOTHING"
}

# Prints the processes with the mark $1, except those that were left behind. The environment of a zombie reads as empty, so
# zombies are not printed.
marked() {
  local file
  for file in $(grep -lsaF -- "$1" /proc/[0-9]*/environ 2>/dev/null); do
    file=${file#/proc/}
    [[ $STUCK == *" ${file%/environ} "* ]] || echo "${file%/environ}"
  done
}

members() {
  marked "$MARK"
}

# Prints the processes of the job except the scheduler.
workers() {
  local pid
  for pid in $(members); do
    grep -qsaF MS_ROLE=MS_SCHED "/proc/$pid/environ" || echo "$pid"
  done
}

# Names the processes that do not end, with their state in the kernel, and ignores them from then on.
leave_behind() {
  local pid state
  for pid in "$@"; do
    state=$(sed -nE 's/^State:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
    echo "msrun_launcher.sh: process $pid (state ${state:-not known}) does not end after SIGKILL and is left behind: it waits for" \
         "a device or a disk that does not answer. Check it before you start the job on this host again" >&2
    STUCK+="$pid "
  done
}

# Sends SIGTERM to the workers, waits $1 seconds, sends SIGKILL, waits MSRUN_STUCK seconds; then the same for the scheduler, which
# the workers need until they end. msrun is killed first: it would kill all other workers as soon as one ends.
end_job() {
  local left who killed
  [[ -z $WATCHER ]] || kill "$WATCHER" 2>/dev/null
  if [[ -n $SUPERVISOR ]]; then
    disown "$SUPERVISOR" 2>/dev/null    # bash does not print that it was killed
    kill -KILL "$SUPERVISOR" 2>/dev/null
    for (( killed = SECONDS; SECONDS - killed <= MSRUN_STUCK; )); do
      kill -0 "$SUPERVISOR" 2>/dev/null || break
      pause 0.02
    done
  fi
  DEADLINE=$((SECONDS + $1))
  for who in workers members; do
    left=$($who) killed=''
    [[ -n $left ]] && kill -TERM $left 2>/dev/null
    while left=$($who) && [[ -n $left ]]; do
      if (( SECONDS >= DEADLINE )); then
        kill -KILL $left 2>/dev/null
        killed=${killed:-$SECONDS}
        (( SECONDS - killed <= MSRUN_STUCK )) || leave_behind $left
      fi
      pause 0.05
    done
    (( DEADLINE <= SECONDS + MSRUN_GRACE )) || DEADLINE=$((SECONDS + MSRUN_GRACE))
  done
}

# Prints the processes among "$@" with a thread that has not ended, except those that were left behind. A process that is ending
# loses its environment before it has closed its files, so marked alone would miss it.
running() {
  local pid
  for pid in "$@"; do
    [[ $STUCK == *" $pid "* ]] || ! grep -qsE '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$pid/task/"*/status || echo "$pid"
  done
}

# Waits until second $1 of this script for writers to finish, then sends SIGKILL, waits MSRUN_STUCK seconds. A writer ends by
# itself after its training.
end_writers() {
  local left killed='' since=''
  while left=$({ marked "$WRITER_MARK"; running $killed; } | sort -u) && [[ -n $left ]]; do
    if (( AT_ONCE || SECONDS >= $1 )); then
      kill -KILL $left 2>/dev/null
      killed=$left since=${since:-$SECONDS}
      (( SECONDS - since <= MSRUN_STUCK )) || leave_behind $left
    fi
    pause 0.05
  done
}

# Kills msrun MSRUN_GRACE seconds after it has reported a failed worker; run_job then ends the remaining processes. If msrun does
# not end, SIGUSR1 makes run_job stop waiting for it.
watch_scheduler() {
  local seconds=-1      # since msrun's report
  while kill -0 "$SUPERVISOR"; do
    pause 1
    if (( seconds >= 0 )) || grep -qE "$FAILED_WORKER" "$1"; then
      (( ++seconds <= MSRUN_GRACE )) || kill -KILL "$SUPERVISOR"
      (( seconds <= MSRUN_GRACE + MSRUN_STUCK )) || kill -USR1 $$
    fi
  done
}

on_signal() {
  trap 'DEADLINE=0 AT_ONCE=1' INT TERM      # a second signal ends the job at once
  local until=$((SECONDS + $3))
  echo "msrun_launcher.sh: SIG$1: ending the job (up to $3 s)" >&2
  end_job "$3"
  end_writers "$until"
  exit "$2"
}

# Copies what msrun prints without what hides the other lines where no log is shown: the command line, again for each worker,
# and a warning that the log of this worker is not shown.
shorten() {
  sed -uE "/'--tail_worker_log' is:/d; /^Start .*process/s/\. (Environment variable|Execute command).*//"
}

# Runs "$@" and returns its exit status. STREAM 1 copies all its output to the file RECORD, 2 only standard error.
# Job control gives the job a process group of its own: Ctrl-C reaches only this script and is handled in one place, and
# SIGINT stays usable in the job. A background group may not read the terminal, hence /dev/null.
run_job() {
  local stream=$1 record=$2 copiers status
  shift 2
  : > "$record" || refuse "$record cannot be written"
  trap 'on_signal INT 130 "$MSRUN_GRACE"' INT
  trap 'on_signal TERM 143 "$MSRUN_LEAVE"' TERM
  trap '' HUP
  trap ':' USR1
  exec {NOTHING}<> <(:)
  set -m
  if (( stream == 1 )); then
    exec 3> >(trap '' INT TERM; exec tee -- "$record")
    copiers=$!
    env "$MARK" "$@" < /dev/null >&3 2>&1 3>&- {NOTHING}>&- &
  else
    exec 3> >(trap '' INT TERM; tee -- "$record" | shorten >&2)
    copiers=$!
    exec 4>&1
    if [[ $JOIN == False ]]; then
      exec 4> >(trap '' INT TERM; exec 3>&-; shorten)
      copiers+=" $!"
    fi
    env "$MARK" "$@" < /dev/null >&4 2>&3 3>&- 4>&- {NOTHING}>&- &
  fi
  local child=$!
  set +m
  exec 3>&- 4>&-
  if (( stream == 2 )); then
    SUPERVISOR=$child
    watch_scheduler "$record" > /dev/null 2>&1 &
    WATCHER=$!
  fi
  wait "$child" 2>/dev/null
  status=$?
  SUPERVISOR=''
  if (( status == 0 )); then
    [[ -z $WATCHER ]] || kill "$WATCHER" 2>/dev/null
  else
    if (( status > 128 && stream == 2 )) && ! grep -qE "$FAILED_WORKER" "$record"; then
      echo "msrun_launcher.sh: msrun was killed (status $status): ending the job" >&2
    fi
    end_job "$MSRUN_GRACE"           # processes that a failed job left running
  fi
  end_writers $((SECONDS + MSRUN_LEAVE))
  for _ in {1..250}; do              # lets the last lines through, without waiting for a process that keeps the pipe
    kill -0 $copiers 2>/dev/null || break
    pause 0.02
  done
  return "$status"
}

# ---------------------------------------------------------------------------------------------------- run
if (( WORKER_NUM == 1 )); then
  case ${COMMAND[0]} in
    python | python3) COMMAND=("$PYTHON" "${COMMAND[@]:1}") ;;
    pytest) ;;
    *) COMMAND=("$PYTHON" "${COMMAND[@]}") ;;
  esac
  LOG=$LOG_DIR/worker_0.log
  echo "msrun_launcher.sh: one worker, running without msrun:$(printf ' %q' "${COMMAND[@]}")"
  echo "msrun_launcher.sh: log: $LOG"
  run_job 1 "$LOG" "${COMMAND[@]}"
  exit
fi

command -v msrun > /dev/null || refuse "no msrun on PATH; it comes with mindspore (activate its environment or set PYTHON)"
[[ -n $(command -v python) ]] || refuse "no python on PATH, which msrun needs to start the workers"
MSRUN=(msrun --worker_num="$WORKER_NUM" --local_worker_num="$LOCAL_WORKER" --master_port="$MASTER_PORT"
       --log_dir="$LOG_DIR" --cluster_time_out="$CLUSTER_TIME_OUT")
if (( LOCAL_WORKER < WORKER_NUM )); then
  echo "msrun_launcher.sh: $LOCAL_WORKER of $WORKER_NUM workers on this host, node rank $NODE_RANK;" \
       "start this script on the other hosts too"
  MSRUN+=(--master_addr="$MASTER_ADDR" --node_rank="$NODE_RANK")
fi

if [[ $JOIN == False && ${MSRUN_DETACH:-0} == 1 ]]; then
  MSRUN+=(--join=False)
elif [[ $JOIN == False ]]; then
  MSRUN+=(--join=True --tail_worker_log="$WORKER_NUM")     # waits; "shows" the log of a worker that does not exist
else
  MSRUN+=(--join=True)
fi
echo "msrun_launcher.sh: running:$(printf ' %q' "${MSRUN[@]}" "${COMMAND[@]}")"
echo "msrun_launcher.sh: logs: $LOG_DIR"
if [[ ${MSRUN[*]} == *--join=False* ]]; then
  exec "${MSRUN[@]}" "${COMMAND[@]}"
fi

ERRORS=$LOG_DIR/msrun_stderr.log
run_job 2 "$ERRORS" "${MSRUN[@]}" "${COMMAND[@]}"
STATUS=$?
if (( STATUS != 0 )); then
  code=$(sed -nE "s/.*$FAILED_WORKER.*/\1/p" "$ERRORS" | head -n 1)
  if [[ -n $code ]]; then
    STATUS=$(( code < 0 ? 128 - code : code & 255 ))
  fi
  echo "msrun_launcher.sh: the job failed with exit status $STATUS; logs: $LOG_DIR/worker_*.log, $LOG_DIR/scheduler.log" >&2
fi
exit "$STATUS"
}
