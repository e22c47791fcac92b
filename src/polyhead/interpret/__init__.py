"""What attention does in a running model: probes, statistics, heads found by what they do.

``probe`` records queries, keys and lse; ``statistics`` has one number per row of weights;
``finding`` labels heads; ``circuits`` reads their weights. Nothing here changes a model.
"""
