"""Who runs jobs: `local` starts a process per device slot on this machine, `process` is what each of them does."""
