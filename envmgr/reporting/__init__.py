"""Reports of runs: what is read from a run's folder, figures of it, and a page that shows them."""
