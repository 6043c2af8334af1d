"""Seeing a run: what happened, and the views of it.

    processes ──EventLog───► events/*.jsonl ──read_events / EventTail──► terminal view, overlap accounting
    trainer ────MetricsLog─► metrics.jsonl        event names: schema.py, metric names: registry.py
            ────Exporter───► GET /metrics
            ────Summary────► summary.json, and the table at the end

How a trainer uses the room:

    log = EventLog(run_dir / "events", process="trainer")
    log.state("run", "starting"); log.state("total_steps", 60)
    metrics_log = MetricsLog(run_dir, resume_step=restored_step)     # cuts the lines of abandoned steps
    overlap, tail = OverlapCollector(), EventTail(run_dir)
    exporter = Exporter(run_dir, port=config.monitor.prometheus.port)

    with log.span("step", step=step) as span:
        async with log.span("wait_data", step=step): ...            # every name of schema.py
        async with log.span("train", step=step) as train: train.add(rows=128)
        emit_queue(log, queue_stats); emit_loads(log, {server_id: load})
        span.add(groups=16, samples=128, dropped=0)
    metrics |= overlap.feed_all(tail.poll())                        # overlap/*, lost_s/* of this step
    metrics_log.write(step, metrics); log.step_metrics(step, metrics); exporter.update(queue_stats, metrics)

    summary = Summary(status="finished", ..., **overlap.run.summary_fields())
    write_summary(run_dir, summary); print_summary(summary, console)

The command line shows `with TerminalView(run_dir): ...` meanwhile; it only reads the run directory.
"""
