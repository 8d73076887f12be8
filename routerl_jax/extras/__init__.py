"""What no run needs: the core never imports this folder, and every folder in it can be removed by itself."""
