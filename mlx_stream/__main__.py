from mlx_stream.cli import main

main()
