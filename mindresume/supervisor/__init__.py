"""Supervises one node's part of a job: notices that a rank has died or hangs, ends what is left,
starts the command again.

    supervisor.Supervisor ─▶ job.Job: start ─▶ watch ─▶ end          one start of the command
    job          members: all descendants of this process, their exit statuses
                 hang: heartbeats without progress
    end          job_end: SIGTERM, deadlines, SIGKILL; who may finish a save before
    decision     restart_policy: a pure function of the starts so far
                 ─▶ exit, restart after a delay, or give up with failure_page
    nodes        rendezvous: the supervisors of several nodes start and end one generation together,
                 through files that a thread exchanges, so that a storage that hangs does not hide a
                 death
    evidence     events and logs, for people

Nothing here imports mindformers or MindSpore: what is known about the training comes from the
heartbeats of its ranks (``coordination.rank_heartbeat``), their exit statuses, and for people the
end of their logs.
"""
