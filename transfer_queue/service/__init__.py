"""The processes of a queue: started, watched, started again; on one node or on a Ray cluster."""
