"""What several studies, scripts or tests share: models of cost, replays, drawn tasks and load."""
