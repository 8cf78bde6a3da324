# Run by cpack. Without these two it would make packages that depend on no library, and say nothing.
foreach(tool dpkg-shlibdeps file)
  find_program(found_${tool} ${tool})
  if(NOT found_${tool})
    message(FATAL_ERROR "Debian packages need ${tool}: deploy/packages.sh build installs it")
  endif()
endforeach()
