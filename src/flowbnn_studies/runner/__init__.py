"""One way to run any study: what a study is, its jobs, the processes that do them, and the results they make together."""
