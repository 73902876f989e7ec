from bellmax.cli import main

main()
