from bellmax_command import main

main()
